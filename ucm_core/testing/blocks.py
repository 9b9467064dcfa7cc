"""Engine memory for tests: rows (id, shard) whose bytes follow from the key."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ucm_core.store.contract import Addresses, Geometry, Ids, RunShape, Shards

#: What a byte of engine memory holds before anything was loaded into it.
UNTOUCHED = 0xEE


def geometry_of(
    shard_count: int = 4, run_nbytes: int = 640, runs_per_shard: int = 2, layout: str = "test"
) -> Geometry:
    """A small geometry of contiguous runs."""
    return Geometry(
        shard_count, run_nbytes * runs_per_shard, runs_per_shard, RunShape(run_nbytes), layout
    )


def block_id(number: int) -> bytes:
    """A valid id; different numbers give ids that share no word."""
    return np.random.default_rng(number).integers(1, 256, 16, dtype=np.uint8).tobytes()


def id_array(numbers: Iterable[int]) -> Ids:
    """``uint8[N, 16]`` of :func:`block_id`."""
    joined = b"".join(block_id(n) for n in numbers)
    ids: Ids = np.frombuffer(joined, np.uint8).reshape(-1, 16).copy()
    return ids


class EngineMemory:
    """Rows of engine memory, one per (object number, shard), ready to be dumped from or loaded to.

    ``memory`` is ``uint8[N, shard_bytes]``; ``ids``, ``shards`` and ``addresses`` fit the store's
    calls. Keep the object alive while a task uses it.
    """

    def __init__(self, geometry: Geometry, rows: Iterable[tuple[int, int]]) -> None:
        self.geometry = geometry
        self.rows = list(rows)
        self.ids: Ids = id_array(n for n, _ in self.rows)
        self.shards: Shards = np.array([s for _, s in self.rows], np.uint32)
        self.memory = np.full((len(self.rows), geometry.shard_bytes), UNTOUCHED, np.uint8)
        run_bytes = geometry.run.nbytes * geometry.run.count
        starts = self.memory.ctypes.data + np.arange(len(self.rows)) * geometry.shard_bytes
        runs = np.arange(geometry.runs_per_shard) * run_bytes
        self.addresses: Addresses = (starts[:, None] + runs[None, :]).astype(np.uint64)

    @classmethod
    def whole(cls, geometry: Geometry, numbers: Iterable[int]) -> EngineMemory:
        """All shards of some objects."""
        return cls(geometry, [(n, s) for n in numbers for s in range(geometry.shard_count)])

    def expected(self, row: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """The bytes that belong to the key of ``row``."""
        number, shard = self.rows[row]
        return np.random.default_rng((number, shard, 7)).integers(
            0, 256, self.geometry.shard_bytes, dtype=np.uint8
        )

    def fill(self) -> EngineMemory:
        """Give every row the bytes that belong to its key."""
        for row in range(len(self.rows)):
            self.memory[row] = self.expected(row)
        return self

    def right(self, row: int) -> bool:
        return bool((self.memory[row] == self.expected(row)).all())

    def untouched(self, row: int) -> bool:
        return bool((self.memory[row] == UNTOUCHED).all())
