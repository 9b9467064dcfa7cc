"""``ucm_limits`` moves the bytes that it claims to move, and reports errors as errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.limits import Limits
from benchmarks.support.shapes import CacheShape

PROGRAM = Path(__file__).resolve().parents[2] / "build/dev/native/ucm_limits"


@pytest.fixture
def limits() -> Iterator[Limits]:
    with Limits(PROGRAM) as program:
        yield program


def test_copy_moves_every_run(limits: Limits, tmp_path: Path) -> None:
    shape = CacheShape("small", "", layers=3, page_bytes=4096, runs=2, objects=5)
    arguments = shape.limit_arguments(tmp_path)
    for direction in ("in", "out"):
        sample = limits.run("copy", direction=direction, kernel="ucm", threads=2, **arguments)
        assert sample.nbytes == shape.total_bytes
        assert sample.operations == shape.objects * shape.layers


def test_write_leaves_nothing_behind(limits: Limits, tmp_path: Path) -> None:
    sample = limits.run(
        "write_files", dir=tmp_path, io_bytes=8192, count=20, depth=4, preallocate=1, keep=0
    )
    assert sample.nbytes == 20 * 8192
    assert list(tmp_path.iterdir()) == []


def test_one_file_is_made_once_and_written_over(limits: Limits, tmp_path: Path) -> None:
    arguments = {"path": tmp_path / "one", "io_bytes": 8192, "count": 20, "depth": 4}
    for command in ("write_one_file", "read_one_file", "write_one_file"):
        sample = limits.run(command, **arguments)
        assert (sample.nbytes, sample.operations) == (20 * 8192, 20)
    assert (tmp_path / "one").stat().st_size == 20 * 8192


def test_missing_files_are_errors(limits: Limits, tmp_path: Path) -> None:
    listing = tmp_path / "list"
    listing.write_text(f"{tmp_path}/absent\n")
    with pytest.raises(RuntimeError, match="0 of 1 paths exist"):
        limits.run("stat_files", list=listing, exist=1)
    assert limits.run("stat_files", list=listing, exist=0).operations == 1
    with pytest.raises(RuntimeError, match="unknown command"):
        limits.run("nonsense")


def test_shards_are_packed_before_they_are_unpacked(limits: Limits, tmp_path: Path) -> None:
    """Contestants take turns, so that the first to run may be the one that unpacks."""
    shards, size = 4, 64 << 10
    path = tmp_path / "shards"
    path.write_bytes(bytes(range(256)) * (shards * size // 256))
    for codec in ("zstd", "lz4"):
        settings = {"path": path, "shard_bytes": size, "codec": codec, "level": 1, "width": 2}
        for how in ("unpack", "unzstd", "pack", "unpack", "zstd", "copy"):
            sample = limits.run("pack_shards", how=how, **settings)
            assert sample.nbytes == shards * size, how
        assert limits.run("pack_shards", how="pack", **settings).operations < shards * size
