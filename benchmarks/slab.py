"""The layout slab beside its physical limits: one preallocated file, written over and read."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.store import COLUMNS, HEADER_BYTES, TARGET_SHAPE, checked, depth, row
from benchmarks.support.limits import Limits
from benchmarks.support.meter import Sample, interleave, measure, wall_ratio
from benchmarks.support.pipelines import Workload, open_pipeline, random_ids
from benchmarks.support.report import Report, Table, Target
from benchmarks.support.shapes import SHAPES, CacheShape
from ucm_core.plugins import PluginHost
from ucm_core.store.contract import Ids
from ucm_core.store.native_store import NativeBlockStore

EXISTING = 10_000
LOOKUP_SHAPE = CacheShape("tiny", "10,000 objects of 4 KiB", 1, 4096, 1, EXISTING)
#: Lookups of one sample: a single one takes less than the clock resolves well.
REPEAT = 20


def run(report: Report, limits: Limits, scratch: Path, rounds: int) -> None:
    """Needs the pipeline Posix."""
    if "Posix" not in PluginHost().load().pipelines:
        report.skip("slab", "the pipeline Posix is not installed")
        return
    for shape in SHAPES:
        transfers(report, limits, scratch, Workload(shape), rounds)
    lookups(report, scratch, rounds)


def _open(shape: CacheShape, directory: Path, times: float) -> NativeBlockStore:
    """A store with room for ``times`` as many objects as the shape has."""
    objects = math.ceil(times * shape.objects)
    capacity = objects * (shape.object_bytes + HEADER_BYTES) + (
        16 << 20
    )  # whole bytes are asked for
    return open_pipeline(
        "Posix", shape, directory, posix_layout="slab", posix_capacity_gb=capacity / 2**30
    )


def transfers(report: Report, limits: Limits, scratch: Path, work: Workload, rounds: int) -> None:
    """Cold loads, and dumps until durable that reuse slots, as a directory in use does."""
    shape = work.shape
    raw = {
        "io_bytes": shape.object_bytes + HEADER_BYTES,
        "count": shape.objects,
        "depth": depth(shape),
        "path": scratch / f"raw-{shape.name}",
    }
    with (
        _open(shape, scratch / f"read-{shape.name}", 1.3) as stored,
        _open(shape, scratch / f"write-{shape.name}", 2.3) as written,
    ):
        dumped = 0

        def dump(store: NativeBlockStore) -> Sample:
            nonlocal dumped
            rows = work.rows(work.ids(dumped))
            dumped += 1
            return measure(
                lambda: checked(store.dump(rows, work.shards, work.addresses), durable=True),
                nbytes=shape.total_bytes,
            )

        loaded = work.rows(work.ids(dumped))
        dump(stored)
        for _ in range(3):  # every slot was in use once: from here all are reused
            dump(written)
        series = interleave(
            {
                "load": lambda: measure(
                    lambda: checked(stored.load(loaded, work.shards, work.addresses)),
                    nbytes=shape.total_bytes,
                ),
                "dump": lambda: dump(written),
                "raw read": lambda: limits.run("read_one_file", **raw),
                "raw write": lambda: limits.run("write_one_file", **raw),
            },
            rounds=rounds,
        )
    read, write = series["raw read"], series["raw write"]
    rows = [
        row("UCM cold load (slab)", series["load"], read),
        row("limit: O_DIRECT reads of one file", read, read),
        row("UCM dump until durable (slab)", series["dump"], write),
        row("limit: O_DIRECT writes over one file", write, write),
    ]
    note = f"{shape.note}. O_DIRECT, depth {raw['depth']}; dumps give up older objects."
    report.table(Table(f"Slabs, {shape.name}", COLUMNS, rows, note))
    if shape.name == TARGET_SHAPE:
        for name, limit, what in (("load", read, "cold load"), ("dump", write, "dump")):
            ratio = 1 / wall_ratio(series[name], limit)
            report.target(
                Target(f"{what} (slab) / raw O_DIRECT, throughput", "at least", 0.9, ratio)
            )


def lookups(report: Report, scratch: Path, rounds: int) -> None:
    """Ids that exist and ids that do not; the GIL is released for the whole call."""
    work = Workload(LOOKUP_SHAPE)
    ids, absent = work.ids(0), random_ids(EXISTING, "absent")
    with _open(LOOKUP_SHAPE, scratch / "lookup", 1.3) as store:
        checked(store.dump(ids, work.shards, work.addresses), durable=True)
        if int(store.lookup(ids).sum()) != len(ids) or store.lookup(absent).any():
            raise RuntimeError("lookup is wrong")

        def repeat(keys: Ids) -> Sample:
            def all_of_them() -> None:
                for _ in range(REPEAT):
                    store.lookup(keys)

            return measure(all_of_them, operations=REPEAT * EXISTING)

        series = interleave(
            {"hits": lambda: repeat(ids), "misses": lambda: repeat(absent)}, rounds=rounds
        )
    rows = [
        [name, f"{s.operations_per_s / 1e6:.1f}", f"{100 * s.spread:.0f} %"]
        for name, s in series.items()
    ]
    report.table(
        Table("Lookup in slabs", ("what", "M ids/s", "spread"), rows, "Batches of 10,000 ids.")
    )
    rate = series["hits"].operations_per_s / 1e6
    report.target(Target("lookup of 10,000 ids (slab)", "at least", 10.0, rate, "M ids/s"))
