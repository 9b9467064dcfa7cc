"""Lookups: ids that exist beside the raw stat rate, full misses, and Python work per block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.store import checked
from benchmarks.support.limits import Limits
from benchmarks.support.meter import Sample, Series, interleave, measure, wall_ratio
from benchmarks.support.opcodes import count_opcodes
from benchmarks.support.pipelines import Workload, open_pipeline, random_ids
from benchmarks.support.report import Report, Table, Target
from benchmarks.support.shapes import CacheShape
from ucm_core.identity.chain import ContentChain
from ucm_core.plugins import PluginHost
from ucm_core.store.contract import Ids
from ucm_core.store.native_store import NativeBlockStore

EXISTING, MISSING = 10_000, 8_192
SHAPE = CacheShape("tiny", "10,000 objects of 4 KiB", 1, 4096, 1, EXISTING)
#: Sizes between which the executed bytecode of a call must not differ.
FEW, MANY = 16, 4096


def run(report: Report, limits: Limits, scratch: Path, rounds: int) -> None:
    """Needs the pipeline Posix."""
    if "Posix" not in PluginHost().load().pipelines:
        report.skip("lookup", "the pipeline Posix is not installed")
        return
    work = Workload(SHAPE)
    ids = work.ids(0)
    with open_pipeline("Posix", SHAPE, scratch / "lookup") as store:
        checked(store.dump(ids, work.shards, work.addresses), durable=True)
        rates(report, limits, scratch, store, ids, rounds)
        bytecode(report, store, work)
    cached(report, scratch, rounds)


def cached(report: Report, scratch: Path, rounds: int) -> None:
    """Ids that the host cache holds: one call, one thread, no GIL, no file."""
    work = Workload(SHAPE)
    ids, absent = work.ids(0), random_ids(EXISTING, "absent from the cache")
    capacity = f"{2 * SHAPE.total_bytes >> 20} MiB"
    with open_pipeline("Cache|Empty", SHAPE, scratch, cache_buffer_capacity_gb=capacity) as store:
        checked(store.dump(ids, work.shards, work.addresses), durable=True)

        def lookup(keys: Ids, expected: int) -> Sample:
            out = store.lookup(keys)
            sample = measure(lambda: store.lookup(keys), operations=len(keys))
            if int(out.sum()) != expected:
                raise RuntimeError(f"lookup found {int(out.sum())} of {expected}")
            return sample

        series = interleave(
            {"hits": lambda: lookup(ids, EXISTING), "misses": lambda: lookup(absent, 0)},
            rounds=5 * rounds,
        )
    names = {"hits": "ids that it holds", "misses": "ids that it does not hold"}
    rows = [
        [
            f"{EXISTING} {names[name]}",
            f"{one.operations_per_s / 1e6:.1f}",
            f"{1e6 * one.wall_s:.0f}",
            f"{100 * one.spread:.0f} %",
        ]
        for name, one in series.items()
    ]
    note = "`BlockStore.lookup` from Python, absent ids asked of a stage that answers at once."
    report.table(
        Table("Lookup in the host cache", ("what", "M ids/s", "wall us", "spread"), rows, note)
    )
    rate = series["hits"].operations_per_s / 1e6
    report.target(Target("lookup of 10,000 ids in Cache", "at least", 30.0, rate, "M ids/s"))


def rates(
    report: Report,
    limits: Limits,
    scratch: Path,
    store: NativeBlockStore,
    ids: Ids,
    rounds: int,
) -> None:
    """Ids that exist and ids that do not, beside stat of the same paths from C++."""
    files = _Files(scratch)
    with open_pipeline("Posix", SHAPE, scratch / "lookup", role="scheduler") as reader:

        def lookup(keys: Ids, expected: int) -> Sample:
            found: list[int] = []
            sample = measure(
                lambda: found.append(int(reader.lookup(keys).sum())), operations=len(keys)
            )
            if found[0] != expected:
                raise RuntimeError(f"lookup found {found[0]} of {expected}")
            return sample

        def prefix(keys: Ids) -> Sample:
            return measure(lambda: reader.lookup_on_prefix(keys), operations=len(keys))

        def stat(keys: Ids, exist: int) -> Sample:
            return limits.run("stat_files", list=files.listing(keys), exist=exist)

        # The kernel remembers names that it did not find: every miss asks for new ones.
        series = interleave(
            {
                "hits": lambda: lookup(ids, len(ids)),
                "raw hits": lambda: stat(ids, 1),
                "misses": lambda: lookup(files.absent(), 0),
                "raw misses": lambda: stat(files.absent(), 0),
                "prefix": lambda: prefix(files.absent()),
            },
            rounds=rounds,
        )
    hits, misses = series["hits"], series["misses"]
    report.table(
        Table(
            "Lookup",
            ("what", "1000 ids/s", "wall ms", "CPU ms", "rate / limit", "spread"),
            [
                _row(f"lookup of {EXISTING} existing ids", hits, series["raw hits"]),
                _row("limit: stat of the same files", series["raw hits"], series["raw hits"]),
                _row(f"lookup of {MISSING} absent ids", misses, series["raw misses"]),
                _row("limit: stat of absent files", series["raw misses"], series["raw misses"]),
                _row(
                    f"longest prefix of {MISSING} absent ids",
                    series["prefix"],
                    series["raw misses"],
                ),
            ],
            "The limit is one C++ thread that calls stat on prepared paths, in the same order.",
        )
    )
    rate = 1 / wall_ratio(hits, series["raw hits"])
    report.target(Target("lookup of 10,000 ids / raw stat rate", "at least", 0.7, rate))
    report.target(Target("full miss of 8,192 ids", "at most", 20.0, 1e3 * misses.wall_s, "ms"))


class _Files:
    """Paths of objects, existing or not, as the Posix stage names them."""

    def __init__(self, scratch: Path) -> None:
        known = next(p for p in (scratch / "lookup").rglob("*") if len(p.name) == 32)
        self._namespace = known.parent.parent
        self._list = scratch / "paths"
        self._asked = 0

    def listing(self, ids: Ids) -> Path:
        names = [i.tobytes().hex() for i in ids]
        self._list.write_text("".join(f"{self._namespace}/{n[:2]}/{n}\n" for n in names))
        return self._list

    def absent(self) -> Ids:
        self._asked += 1
        return random_ids(MISSING, f"absent {self._asked}")


def _row(what: str, ours: Series, limit: Series) -> list[str]:
    return [
        what,
        f"{ours.operations_per_s / 1e3:.0f}",
        f"{1e3 * ours.wall_s:.2f}",
        f"{1e3 * ours.cpu_s:.2f}",
        f"{1 / wall_ratio(ours, limit):.2f}x",
        f"{100 * ours.spread:.0f} %",
    ]


def bytecode(report: Report, store: NativeBlockStore, work: Workload) -> None:
    """Executed Python instructions of each hot call for few and for many blocks."""
    seed = bytes(range(32))
    tokens = np.arange(MANY * 64, dtype=np.uint32)
    ids = work.ids(0)

    def hashing(n: int) -> None:
        chain = ContentChain(64)
        chain.extend(tokens[: n * 64])
        chain.object_ids(seed)

    def load(n: int) -> None:
        checked(store.load(ids[:n], work.shards[:n], work.addresses[:n]))

    def dump(n: int) -> None:
        checked(store.dump(ids[:n], work.shards[:n], work.addresses[:n]))

    calls: dict[str, Callable[[int], object]] = {
        "hash and object ids": hashing,
        "lookup": lambda n: store.lookup(ids[:n]),
        "load and wait": load,
        "dump and wait": dump,
    }
    rows, worst = [], 0
    for name, call in calls.items():
        call(FEW)  # imports and first-use set-up are not the hot path
        few = count_opcodes(partial(call, FEW))
        many = count_opcodes(partial(call, MANY))
        worst = max(worst, many - few)
        rows.append([name, str(few), str(many)])
    columns = ("call", f"{FEW} blocks", f"{MANY} blocks")
    note = "Bytecode instructions executed in our packages, counted exactly (not a timing)."
    report.table(Table("Python work per call", columns, rows, note))
    what = f"extra Python instructions, {MANY} blocks instead of {FEW}"
    report.target(Target(what, "at most", 0, worst, "instructions"))
