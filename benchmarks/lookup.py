"""Lookups: ids that exist beside the raw stat rate, full misses, and Python work per block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.store import checked
from benchmarks.support.limits import Limits
from benchmarks.support.meter import Sample, interleave, measure, wall_ratio
from benchmarks.support.opcodes import count_opcodes
from benchmarks.support.pipelines import Workload, open_pipeline, random_ids
from benchmarks.support.report import Report, Table, Target
from benchmarks.support.shapes import CacheShape
from ucm_core.identity.chain import ContentChain
from ucm_core.plugins import PluginHost
from ucm_core.store.native_store import NativeBlockStore

EXISTING, MISSING = 10_000, 8_192
SHAPE = CacheShape("tiny", "10,000 objects of 4 KiB", 1, 4096, 1, EXISTING)
#: Sizes between which the executed bytecode of a call must not differ.
FEW, MANY = 16, 4096


def run(report: Report, limits: Limits, scratch: Path, rounds: int) -> None:
    """Needs the pipeline Posix; leaves nothing below ``scratch``."""
    if "Posix" not in PluginHost().load().pipelines:
        report.skip("lookup", "the pipeline Posix is not installed")
        return
    work = Workload(SHAPE)
    ids = work.ids(0)
    with open_pipeline("Posix", SHAPE, scratch / "lookup") as store:
        checked(store.dump(ids, work.shards, work.addresses), durable=True)
        rates(report, limits, scratch, store, ids, rounds)
        bytecode(report, store, work)


def rates(
    report: Report,
    limits: Limits,
    scratch: Path,
    store: NativeBlockStore,
    ids: np.ndarray,
    rounds: int,
) -> None:
    directory = scratch / "lookup"
    paths = {p.name: p for p in directory.rglob("*") if len(p.name) == 32 and p.is_file()}
    listing = scratch / "stat"
    # In the order of the lookup, so that both walk the directories alike.
    listing.write_text("".join(f"{paths[i.tobytes().hex()]}\n" for i in ids))
    absent = random_ids(MISSING, "absent")
    with open_pipeline("Posix", SHAPE, directory, role="scheduler") as reader:

        def lookup(keys: np.ndarray, expected: int) -> Sample:
            found: list[int] = []
            sample = measure(
                lambda: found.append(int(reader.lookup(keys).sum())), operations=len(keys)
            )
            if found[0] != expected:
                raise RuntimeError(f"lookup found {found[0]} of {expected}")
            return sample

        series = interleave(
            {
                "hits": lambda: lookup(ids, len(ids)),
                "stat": lambda: limits.run("stat_files", list=listing, exist=1),
                "misses": lambda: lookup(absent, 0),
                "prefix": lambda: measure(lambda: reader.lookup_on_prefix(absent), operations=1),
            },
            rounds=rounds,
        )
    hits, stat, misses = series["hits"], series["stat"], series["misses"]
    rows = [
        [
            name,
            f"{ours.operations_per_s / 1e3:.0f}",
            f"{1e3 * ours.wall_s:.2f}",
            f"{1e3 * ours.cpu_s:.2f}",
            f"{100 * ours.spread:.0f} %",
        ]
        for name, ours in (
            (f"lookup of {EXISTING} existing ids", hits),
            ("limit: stat of the same files", stat),
            (f"lookup of {MISSING} absent ids", misses),
            (f"longest prefix of {MISSING} absent ids", series["prefix"]),
        )
    ]
    report.table(Table("Lookup", ("what", "1000 ids/s", "wall ms", "CPU ms", "spread"), rows))
    rate = 1 / wall_ratio(hits, stat)
    report.target(Target("lookup of 10,000 ids / raw stat rate", "at least", 0.7, rate))
    report.target(Target("full miss of 8,192 ids", "at most", 20.0, 1e3 * misses.wall_s, "ms"))


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
