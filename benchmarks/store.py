"""The store beside its physical limits: hot load, cold load, dump and lookup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.support.limits import Limits
from benchmarks.support.meter import Sample, Series, cpu_ratio, interleave, measure, wall_ratio
from benchmarks.support.pipelines import Workload, open_pipeline
from benchmarks.support.report import Report, Table, Target
from benchmarks.support.shapes import SHAPES, CacheShape
from ucm_core.plugins import PluginHost
from ucm_core.store.contract import Status
from ucm_core.store.native_store import NativeBlockStore, NativeTask

#: What a root's I/O thread keeps in flight; the raw limits get the same depth.
BYTES_IN_FLIGHT = 32 << 20
DEPTH_RANGE = (4, 32)
#: Our files hold a header before the data: the raw limits move as many bytes.
HEADER_BYTES = 4096
#: The shape whose figures are the targets: the cache of the TTFT benchmark.
TARGET_SHAPE = "llama-80m"

COLUMNS = ("what", "GB/s", "CPU-s/GB", "throughput / limit", "CPU / limit", "spread")


def run(report: Report, limits: Limits, scratch: Path, rounds: int) -> None:
    """All shapes. What is written below ``scratch`` stays until the caller removes it."""
    known = PluginHost().load().pipelines
    for shape in SHAPES:
        work = Workload(shape)
        if "Cache|Posix" in known:
            hot(report, limits, scratch, work, rounds)
        else:
            report.skip(f"hot load, {shape.name}", "the pipeline Cache|Posix is not installed")
        if "Posix" in known:
            disk(report, limits, scratch, work, rounds)
        else:
            report.skip(f"files, {shape.name}", "the pipeline Posix is not installed")


def depth(shape: CacheShape) -> int:
    """Operations in flight at the disk for objects of this size."""
    low, high = DEPTH_RANGE
    return max(low, min(high, BYTES_IN_FLIGHT // (shape.object_bytes + HEADER_BYTES)))


def checked(task: NativeTask, *, durable: bool = False) -> None:
    """Wait, and refuse to measure failures."""
    results = task.wait_durable() if durable else task.wait()
    bad = np.flatnonzero(results != Status.OK)
    if len(bad):
        raise RuntimeError(
            f"{len(bad)} of {len(results)} shards failed, the first with {Status(results[bad[0]])!r}"
        )


def hot(report: Report, limits: Limits, scratch: Path, work: Workload, rounds: int) -> None:
    """Loads of what the host cache holds, beside the copy kernel on the same strides."""
    shape = work.shape
    arguments = shape.limit_arguments(scratch)
    ids = work.rows(work.ids(0))
    capacity = 2 * shape.total_bytes / 2**30

    def copy(kernel: str) -> Callable[[], Sample]:
        return lambda: limits.run("copy", direction="out", kernel=kernel, threads=1, **arguments)

    with open_pipeline(
        "Cache|Posix", shape, scratch / "hot", cache_buffer_capacity_gb=capacity
    ) as store:
        checked(store.dump(ids, work.shards, work.addresses), durable=True)

        def load() -> Sample:
            return measure(
                lambda: checked(store.load(ids, work.shards, work.addresses)),
                nbytes=shape.total_bytes,
            )

        series = interleave(
            {"hot load": load, "copy kernel": copy("ucm"), "memcpy": copy("memcpy")}, rounds=rounds
        )
    limit = series["copy kernel"]
    rows = [
        row("UCM hot load (Cache)", series["hot load"], limit),
        row("limit: copy kernel alone", limit, limit),
        row("memcpy on the same strides", series["memcpy"], limit),
    ]
    report.table(Table(f"Hot load, {shape.name}", COLUMNS, rows, shape.note))
    if shape.name == TARGET_SHAPE:
        cpu = cpu_ratio(series["hot load"], limit)
        report.target(Target("hot load / copy kernel, CPU per GB", "at most", 1.15, cpu))
        throughput = 1 / wall_ratio(series["hot load"], limit)
        report.target(Target("hot load / copy kernel, throughput", "at least", 0.85, throughput))


def disk(report: Report, limits: Limits, scratch: Path, work: Workload, rounds: int) -> None:
    """Dumps until durable and cold loads, beside raw O_DIRECT at the same I/O size and depth."""
    shape = work.shape
    raw = {
        "io_bytes": shape.object_bytes + HEADER_BYTES,
        "count": shape.objects,
        "depth": depth(shape),
    }
    ours, raw_dir = scratch / f"ours-{shape.name}", scratch / f"raw-{shape.name}"
    raw_dir.mkdir(exist_ok=True)
    with (
        open_pipeline("Posix", shape, ours) as store,
        # Every load of this one goes to the files, into slots of the host cache.
        open_pipeline(
            "Cache|Posix",
            shape,
            ours,
            cache_load_backend_only=True,
            cache_buffer_capacity_gb=2 * shape.total_bytes / 2**30,
        ) as cached,
    ):
        files = _FileLoads(store, work, ours, raw_dir)
        series = interleave(
            {
                "dump": files.dump,
                "cold load": lambda: files.load(store),
                "cold load, cache": lambda: files.load(cached),
                "raw write": lambda: limits.run(
                    "write_files", dir=files.new_directory(), preallocate=0, keep=1, **raw
                ),
                "raw read": lambda: limits.run("read_one_file", path=raw_dir / "one", **raw),
                "raw read of files": lambda: limits.run(
                    "read_files", list=files.listing(), io_bytes=raw["io_bytes"], depth=raw["depth"]
                ),
            },
            rounds=rounds,
        )
    read, write = series["raw read"], series["raw write"]
    rows = [
        row("UCM cold load (Posix)", series["cold load"], read),
        row("UCM cold load (Cache|Posix)", series["cold load, cache"], read),
        row("limit: O_DIRECT reads of one file", read, read),
        row("open + fstat + read + close of our files", series["raw read of files"], read),
        row("UCM dump until durable (Posix)", series["dump"], write),
        row("limit: create + write + rename", write, write),
    ]
    note = f"{shape.note}. O_DIRECT, depth {raw['depth']}; the disk's own noise shows as spread."
    report.table(Table(f"Files, {shape.name}", COLUMNS, rows, note))
    if shape.name == TARGET_SHAPE:
        for pipeline, name in (("Posix", "cold load"), ("Cache|Posix", "cold load, cache")):
            what = f"cold load ({pipeline}) / raw O_DIRECT read, throughput"
            cold = 1 / wall_ratio(series[name], read)
            report.target(Target(what, "at least", 0.85, cold))
        dump = 1 / wall_ratio(series["dump"], write)
        what = "dump / create + write + rename, throughput"
        report.target(Target(what, "at least", 0.8, dump))


class _FileLoads:
    """One batch of files that is loaded again and again, and new batches that are dumped."""

    def __init__(self, store: NativeBlockStore, work: Workload, directory: Path, raw: Path) -> None:
        self._store, self._work = store, work
        self._dumped = 0
        self._ids = work.ids(0)
        checked(self._submit(self._ids), durable=True)
        self._raw, self._raw_writes = raw, 0
        self._list = raw / "list"
        names = [p for p in directory.rglob("*") if len(p.name) == 32 and p.is_file()]
        if len(names) != work.shape.objects:
            raise RuntimeError(f"{len(names)} files of {work.shape.objects} objects")
        self._list.write_text("".join(f"{name}\n" for name in names))

    def _submit(self, ids: np.ndarray) -> NativeTask:
        return self._store.dump(self._work.rows(ids), self._work.shards, self._work.addresses)

    def listing(self) -> Path:
        return self._list

    def new_directory(self) -> Path:
        """Where the raw writes of a round go. Files of both sides stay until the end: creating after
        deleting is slow on ext4, which looks for inodes that were not in use just before."""
        self._raw_writes += 1
        path = self._raw / str(self._raw_writes)
        path.mkdir()
        return path

    def load(self, store: NativeBlockStore) -> Sample:
        rows, work = self._work.rows(self._ids), self._work
        return measure(
            lambda: checked(store.load(rows, work.shards, work.addresses)),
            nbytes=work.shape.total_bytes,
        )

    def dump(self) -> Sample:
        self._dumped += 1
        ids = self._work.ids(self._dumped)
        return measure(
            lambda: checked(self._submit(ids), durable=True), nbytes=self._work.shape.total_bytes
        )


def row(what: str, ours: Series, limit: Series) -> list[str]:
    """One line of a throughput table."""
    return [
        what,
        f"{ours.gb_per_s:.2f}",
        f"{ours.cpu_s_per_gb:.3f}",
        f"{1 / wall_ratio(ours, limit):.2f}x",
        f"{cpu_ratio(ours, limit):.2f}x",
        f"{100 * ours.spread:.0f} %",
    ]
