"""Ranks of a node that load the same blocks through one host cache, over a backend of 20 ms.

Every rank is a process with a store of its own over a simulated backend that serves one read at a time;
what they share is the cache. ``python -m benchmarks.ranks RANK RANKS DEPTH NAME`` is one rank: it says
when it is ready and loads when told, cold and then hot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.support.meter import cpu_seconds
from benchmarks.support.pipelines import random_ids
from benchmarks.support.report import Report, Table, Target
from ucm_core import _native
from ucm_core.store.contract import Geometry, RunShape, Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry

ROOT = Path(__file__).resolve().parents[1]
BLOCKS, LATENCY_S = 12, 0.02
#: Slices that a rank walks, each one read long, when all ranks share the work.
SHAPE = Geometry(1, 64 << 10, 1, RunShape(64 << 10), "benchmarks/ranks")
DEPTHS = ((1, "one read each at a time"), (64, "all reads at once"))


def run(report: Report, rounds: int) -> None:
    """Medians over ``rounds`` groups of fresh processes."""
    rows: list[list[str]] = []
    for depth, what in DEPTHS:
        for ranks in (1, 2, 4, 8):
            results = [group(ranks, depth, f"{ranks}-{depth}-{n}") for n in range(min(rounds, 5))]
            cold = median(r["cold_s"] for r in results)
            reads = max(r["reads"] for r in results)
            steps = -(-BLOCKS // ranks) * LATENCY_S
            rows.append(
                [
                    f"{ranks}, {what}",
                    f"{reads:.0f}",
                    f"{median(r['reads'] * LATENCY_S / r['cold_s'] for r in results):.1f}",
                    f"{1e3 * cold:.1f}",
                    f"{cold / steps:.2f}x",
                    f"{1e3 * median(r['hot_s'] for r in results):.2f}",
                    f"{100 * median(r['cpu_s'] / r['cold_s'] for r in results):.1f} %",
                ]
            )
            if (ranks, depth) == (4, 1):
                report.target(
                    Target("4 ranks, 12 blocks: reads in all", "at most", BLOCKS, reads, "")
                )
                report.target(
                    Target("4 ranks, 12 blocks / 3 reads of 20 ms", "at most", 1.2, cold / steps)
                )
    columns = ("ranks", "reads", "in flight", "cold ms", "/ ideal", "hot ms", "CPU of a rank")
    note = (
        f"{BLOCKS} blocks of one shard, backend {1e3 * LATENCY_S:.0f} ms a read and one read at a time "
        "per process. In flight: mean over the load. Ideal: the longest rank's share, read by read. "
        "CPU: user and system of one rank over the cold load."
    )
    report.table(Table("Ranks over one cache", columns, rows, note))


def group(ranks: int, depth: int, name: str) -> dict[str, float]:
    """One start of ``ranks`` processes: seconds until the last has its blocks, reads of all."""
    name = f"ranks-{os.getpid()}-{name}"
    command = [sys.executable, "-m", "benchmarks.ranks"]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(depth), name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [_ask(child, None) for child in children]
        at = time.monotonic() + 0.05
        for child in children:
            _tell(child, str(at))
        told = [_ask(child, None) for child in children]
        for child in children:
            _tell(child, str(time.monotonic() + 0.05))
        hot = [_ask(child, None) for child in children]
    finally:
        for child in children:
            child.communicate()
    return {
        "cold_s": max(t["end"] for t in told) - at,
        "cpu_s": median(t["cpu_s"] for t in told),
        "reads": sum(t["reads"] for t in hot),
        "hot_s": median(t["end"] - t["begin"] for t in hot),
    }


def _tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def _ask(child: subprocess.Popen[str], line: str | None) -> dict[str, float]:
    if line is not None:
        _tell(child, line)
    assert child.stdout is not None
    text = child.stdout.readline()
    if not text:
        raise RuntimeError(f"a rank ended (code {child.wait()})")
    answer: dict[str, float] = json.loads(text)
    return answer


def rank_process(rank: int, ranks: int, depth: int, name: str) -> None:
    """One rank: blocks are on its backend already, the cache is empty."""
    geometry = native_geometry(SHAPE)
    medium = _native.FakeMedium()
    ids = random_ids(BLOCKS, "ranks")
    shards = np.zeros(BLOCKS, np.uint32)
    memory = np.zeros((BLOCKS, SHAPE.shard_bytes), np.uint8)
    addresses = (memory.ctypes.data + np.arange(BLOCKS) * SHAPE.shard_bytes).astype(np.uint64)
    rows = addresses.reshape(-1, 1)

    def store(stage: _native.Stage, tier: _native.HostTier) -> NativeBlockStore:
        native = _native.Store(
            stage,
            tier,
            timeout_ms=30_000,
            waiting_depth=1000,
            running_depth=depth,
            copiers=1,
            write_retries=0,
            retry_delay_ms=1,
            open_age_ms=0,
        )
        return NativeBlockStore(native, SHAPE)

    with store(
        _native.FakeStage(geometry, medium),
        _native.staging_tier(geometry, load_reserve=4, shared=2 * BLOCKS),
    ) as fill:
        fill.dump(ids, shards, rows).wait_durable()
    stage = _native.FakeStage(geometry, medium, latency_us=int(1e6 * LATENCY_S))
    tier = _native.cache_tier(
        geometry,
        name=name,
        namespace_digest=bytes(32),
        capacity_bytes=4 * BLOCKS * geometry.object_bytes,
        load_reserve=0,
        load_reserve_explicit=True,
        rank=rank,
        rank_size=ranks,
    )
    with store(stage, tier) as ranked:
        print(json.dumps({}), flush=True)
        for _ in ("cold", "hot"):
            at = float(sys.stdin.readline())
            time.sleep(max(0.0, at - time.monotonic()))
            cpu, begin = cpu_seconds(), time.monotonic()
            result = ranked.load(ids, shards, rows).wait()
            end, used = time.monotonic(), cpu_seconds() - cpu
            if not (result == Status.OK).all():
                raise RuntimeError(f"rank {rank}: {result}")
            answer = {"begin": begin, "end": end, "cpu_s": used}
            print(json.dumps(answer | {"reads": stage.stats()["reads_total"]}), flush=True)
        sys.stdin.readline()  # the cache lives until everybody has it


if __name__ == "__main__":
    if len(sys.argv) == 5:
        rank_process(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        run(Report(), 3)
