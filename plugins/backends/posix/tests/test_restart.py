"""B50: a start over many files scans nothing, finds everything, and still counts them for collection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from posix_store import PosixStore, geometry

from ucm_core.store.contract import Status

FEW, MANY = 200, 20_000
TINY = geometry(shards=1, shard_bytes=512)
BATCH = 2_000


def _fill(root: Path, count: int) -> None:
    """``count`` objects of 512 bytes, dumped in batches of one source buffer."""
    with PosixStore([root], shape=TINY, options={"io_direct": False}) as store:
        memory = np.zeros((BATCH, 512), np.uint8)
        addresses = memory.ctypes.data + np.arange(BATCH, dtype=np.uint64) * 512
        for first in range(0, count, BATCH):
            ids = _ids(first, min(BATCH, count - first))
            where = addresses[: len(ids)].astype(np.uint64).reshape(-1, 1)
            task = store.store.dump(ids, np.zeros(len(ids), np.uint32), where)
            assert (task.wait_durable() == Status.OK).all()


def _ids(first: int, count: int) -> np.ndarray:
    ids = np.zeros((count, 16), np.uint8)
    ids[:, :8] = (
        (np.arange(first, first + count, dtype=np.uint64) * 0x9E3779B97F4A7C15 + 1)
        .view(np.uint8)
        .reshape(-1, 8)
    )
    ids[:, 15] = 1
    return ids


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    roots = {count: tmp_path_factory.mktemp(f"files-{count}") for count in (FEW, MANY)}
    for count, root in roots.items():
        _fill(root, count)
    return roots


def _start(root: Path) -> float:
    """Seconds from nothing to the answer of the first lookup, which must be all hits."""
    began = time.perf_counter()
    with PosixStore([root], shape=TINY, options={"io_direct": False}) as store:
        found = store.store.lookup(_ids(0, 64))
        took = time.perf_counter() - began
    assert found.all()
    return took


def test_the_first_lookup_hits_and_the_start_is_no_slower(filled: dict[int, Path]) -> None:
    times: dict[int, list[float]] = {FEW: [], MANY: []}
    for _ in range(7):
        for count, root in filled.items():
            times[count].append(_start(root))
    few, many = min(times[FEW]), min(times[MANY])
    assert many < few * 1.2 + 0.005, f"{many:.4f} s with {MANY} files, {few:.4f} s with {FEW}"


def test_files_of_an_earlier_process_are_collected(filled: dict[int, Path]) -> None:
    root = filled[MANY]
    size = next(path for path in root.rglob("*") if path.is_file() and len(path.name) == 32)
    budget = MANY * size.stat().st_blocks * 512 // 2
    options = {
        "io_direct": False,
        "posix_capacity_gb": f"{budget >> 10} KiB",
        "posix_gc_check_interval_sec": 1,
    }
    with PosixStore([root], shape=TINY, options=options) as store:
        deadline = time.monotonic() + 30
        while store.stat("gc_removed_total") < MANY // 2:
            assert time.monotonic() < deadline, store.store.stats()
            time.sleep(0.05)
        left = store.store.lookup(_ids(0, MANY))
        assert 0 < left.sum() <= MANY // 2
