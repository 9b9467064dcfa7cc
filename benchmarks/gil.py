"""Python beside a load: what other Python threads keep of their rate while the store moves blocks.

A serving engine's scheduler, detokeniser and HTTP front end are Python threads. A cache that works on
blocks in Python, or holds the interpreter lock while it moves them, slows all of them.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from statistics import median

from benchmarks.store import checked
from benchmarks.support.pipelines import Workload, open_pipeline
from benchmarks.support.report import Report, Table, Target
from benchmarks.support.shapes import CacheShape
from ucm_core.plugins import PluginHost
from ucm_core.store.native_store import NativeBlockStore

#: Small blocks: the more of them, the more any work per block would show.
SHAPE = CacheShape("small", "2,000 objects of 4 KiB", 1, 4096, 1, 2000)
#: How long a window of counting lasts at least; loads repeat until then.
WINDOW_S = 0.25
PIPELINES = {"Posix": "files", "Cache|Posix": "host cache"}


class _Counter:
    """A pure-Python thread that counts as fast as the interpreter lets it."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="counter", daemon=True)

    def __enter__(self) -> _Counter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stop:
            self.count += 1

    def rate_during(self, work: NativeBlockStore | None, load: Workload) -> tuple[float, int]:
        """Counts per second over a window of loads (or of sleep), and how many calls it made."""
        ids = load.ids(0)
        calls, count, started = 0, self.count, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < WINDOW_S:
            if work is None:
                time.sleep(WINDOW_S)
            else:
                checked(work.load(ids, load.shards, load.addresses))
            calls += 1
        elapsed = time.perf_counter() - started
        return (self.count - count) / elapsed, calls


def run(report: Report, scratch: Path, rounds: int) -> None:
    """Case B45: at least 0.7 of its solo rate."""
    known = PluginHost().load().pipelines
    rows = []
    for pipeline, where in PIPELINES.items():
        if pipeline not in known:
            report.skip(f"Python beside a load ({pipeline})", "the pipeline is not installed")
            continue
        work = Workload(SHAPE)
        sizes = {"cache_buffer_capacity_gb": 0.25} if pipeline.startswith("Cache") else {}
        directory = scratch / where.replace(" ", "-")
        with (
            open_pipeline(pipeline, SHAPE, directory, "worker", **sizes) as store,
            _Counter() as counter,
        ):
            checked(store.dump(work.ids(0), work.shards, work.addresses), durable=True)
            ratios, loads = [], 0
            for _ in range(rounds):
                solo, _ = counter.rate_during(None, work)
                beside, calls = counter.rate_during(store, work)
                ratios.append(beside / solo)
                loads += calls
        ratio = median(ratios)
        rows.append([f"{pipeline} ({where})", str(loads), f"{ratio:.2f}x", f"{min(ratios):.2f}x"])
        what = f"Python thread beside loads of 2,000 blocks ({pipeline}) / alone"
        report.target(Target(what, "at least", 0.7, ratio))
    report.table(
        Table(
            "Python beside a load",
            ("pipeline", "calls", "rate / alone", "worst round"),
            rows,
            f"{SHAPE.note}, loaded by one call; a pure-Python counter runs on another thread.",
        )
    )
