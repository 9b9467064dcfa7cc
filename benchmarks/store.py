"""The store beside its physical limits: hot load, cold load, dump and lookup."""

from __future__ import annotations

from pathlib import Path

from benchmarks.support.limits import Limits
from benchmarks.support.meter import Series, interleave
from benchmarks.support.report import Report, Table
from benchmarks.support.shapes import SHAPES, CacheShape

#: Operations in flight at the disk, ours and the raw limit's.
DEPTH = 16


def run(report: Report, limits: Limits, scratch: Path, rounds: int) -> None:
    """All shapes; leaves nothing below ``scratch``."""
    for shape in SHAPES:
        memory(report, limits, scratch, shape, rounds)
        disk(report, limits, scratch, shape, rounds)


def memory(report: Report, limits: Limits, scratch: Path, shape: CacheShape, rounds: int) -> None:
    """Copies between engine pages and host memory: the limit of hot load and of a dump's copy."""
    arguments = shape.limit_arguments(scratch)

    def copy(direction: str, kernel: str) -> Series:
        return series[f"{direction} {kernel}"]

    contestants = {
        f"{direction} {kernel}": lambda d=direction, k=kernel: limits.run(
            "copy", direction=d, kernel=k, threads=1, **arguments
        )
        for direction in ("out", "in")
        for kernel in ("ucm", "memcpy")
    }
    series = interleave(contestants, rounds=rounds)
    rows = [
        row("copy kernel, to the engine", copy("out", "ucm")),
        row("memcpy, to the engine", copy("out", "memcpy")),
        row("copy kernel, from the engine", copy("in", "ucm")),
        row("memcpy, from the engine", copy("in", "memcpy")),
    ]
    report.table(Table(f"Memory, {shape.name}", COLUMNS, rows, shape.note))


def disk(report: Report, limits: Limits, scratch: Path, shape: CacheShape, rounds: int) -> None:
    """Whole objects from and to files."""
    base = {"io_bytes": shape.object_bytes, "count": shape.objects, "depth": DEPTH}
    contestants = {
        "raw read": lambda: limits.run("read_one_file", path=scratch / "raw", **base),
        "raw write": lambda: limits.run("write_files", dir=scratch, preallocate=0, **base),
    }
    series = interleave(contestants, rounds=rounds)
    rows = [
        row("raw O_DIRECT read, one file", series["raw read"]),
        row("raw create + write + rename", series["raw write"]),
    ]
    note = f"{shape.note}. O_DIRECT through io_uring, depth {DEPTH}."
    report.table(Table(f"Disk, {shape.name}", COLUMNS, rows, note))


COLUMNS = ("what", "GB/s", "CPU-s/GB", "spread")


def row(what: str, series: Series) -> list[str]:
    """One line of a throughput table."""
    return [
        what,
        f"{series.gb_per_s:.2f}",
        f"{series.cpu_s_per_gb:.3f}",
        f"{100 * series.spread:.0f} %",
    ]
