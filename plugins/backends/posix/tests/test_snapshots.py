"""States in files: across stores, damaged on disk, and donated without a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from posix_store import PosixStore, content, geometry, ids_of, object_path

from ucm_core.store.contract import Status
from ucm_core.store.snapshot import SnapshotStore

SHAPE = geometry(shards=3, shard_bytes=8192)


def addresses(memory: np.ndarray) -> np.ndarray:
    """``uint64[N, shards, 1]`` of ``memory[N, shards, shard_bytes]``."""
    first = memory.ctypes.data + np.arange(memory.shape[0] * 3) * 8192
    return first.astype(np.uint64).reshape(-1, 3, 1)


def put(store: SnapshotStore, *numbers: int) -> list[int]:
    memory = np.stack([content(SHAPE, n) for n in numbers])
    return store.put(ids_of(numbers), addresses(memory)).wait_durable().tolist()


def get(store: SnapshotStore, *numbers: int) -> tuple[list[int], np.ndarray]:
    memory = np.zeros((len(numbers), 3, 8192), np.uint8)
    return store.get(ids_of(numbers), addresses(memory)).wait().tolist(), memory


@pytest.mark.parametrize(
    "cache", [None, {"cache_buffer_capacity_gb": "8 MiB", "share_buffer_enable": False}]
)
def test_another_process_s_states_are_whole(
    tmp_path: Path, cache: dict[str, object] | None
) -> None:
    with PosixStore([tmp_path], SHAPE, cache=cache) as first:
        store = SnapshotStore(first.store)
        assert put(store, 1, 2) == [Status.OK] * 2
        buffer = store.lend(ids_of([3]))
        assert buffer is not None
        buffer.array[:] = content(SHAPE, 3)
        assert store.donate(buffer).wait_durable().tolist() == [Status.OK]
    with PosixStore([tmp_path], SHAPE, cache=cache) as second:
        store = SnapshotStore(second.store)
        statuses, memory = get(store, 1, 2, 3, 4)
        assert statuses == [Status.OK] * 3 + [Status.MISS]
        for i in range(3):
            assert np.array_equal(memory[i], content(SHAPE, i + 1))


def test_a_damaged_file_is_no_state(tmp_path: Path) -> None:
    with PosixStore([tmp_path], SHAPE) as opened:
        store = SnapshotStore(opened.store)
        put(store, 1, 2)
        path = object_path(tmp_path, 1)
        raw = bytearray(path.read_bytes())
        raw[-100] ^= 0xFF  # in the last shard
        path.write_bytes(raw)
        statuses, memory = get(store, 1, 2)
        assert statuses == [Status.CORRUPT, Status.OK]
        assert np.array_equal(memory[1], content(SHAPE, 2))
        assert get(store, 1)[0] == [Status.MISS]  # it was removed,
        assert put(store, 1) == [Status.OK]  # so that the next put heals it
        assert get(store, 1)[0] == [Status.OK]
