"""One pool's pages on their way: which are stored, loads into it and saves out of it, results per page.

A batch is one task a pool, whatever the number of pages; Python sees arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ucm_core.identity import Ids, object_ids
from ucm_core.store.contract import Addresses, BlockStore, Shards
from ucm_sglang.keys import Links
from ucm_sglang.rows import PoolRow

Results = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


class PoolLane:
    """Thread-safe. ``store`` holds all objects of the pool's pages (they have one geometry)."""

    def __init__(self, pool: PoolRow, store: BlockStore) -> None:
        self.pool = pool
        self._store = store
        self._rotation = b""

    @property
    def page_bytes(self) -> int:
        return self.pool.shape.pages.page_bytes

    def rotate(self, rotation: bytes) -> None:
        """From now on pages are known by other ids: what was stored before is not found any more."""
        self._rotation = rotation

    def present(self, links: Links) -> Bools:
        """``bool[N]``: every object of the page is stored."""
        there = np.ones(len(links), dtype=bool)
        for ids in self._ids(links):
            there &= self._store.lookup(ids)
        return there

    def leading(self, links: Links) -> int:
        """Pages at the beginning of which every object is stored."""
        return min(self._store.lookup_on_prefix(ids) + 1 for ids in self._ids(links))

    def load(self, links: Links, parts: Addresses) -> Results:
        """``uint8[N]`` of ``Status`` of each page. ``parts``: ``uint64[N, P]``. Waits no longer than
        the store's ``timeout_ms``; no byte is written into the pool after it has returned."""
        return self._whole(len(links), self._store.load(*self._rows(links, parts)).wait())

    def save(self, links: Links, parts: Addresses) -> Results:
        """As :meth:`load`; ``OK`` once the page is where a later process finds it."""
        task = self._store.dump(*self._rows(links, parts))
        return self._whole(len(links), task.wait_durable())

    def _ids(self, links: Links) -> list[Ids]:
        if self._rotation:
            links = _rotated(links, self._rotation)
        return [object_ids(held.seed, links) for held in self.pool.held]

    def _rows(self, links: Links, parts: Addresses) -> tuple[Ids, Shards, Addresses]:
        shards = self.pool.held[0].cut.shards
        ids = np.concatenate([np.repeat(i, shards, axis=0) for i in self._ids(links)])
        numbers = np.tile(np.arange(shards, dtype=np.uint32), len(links) * len(self.pool.held))
        where = np.concatenate([held.cut.addresses(parts) for held in self.pool.held])
        return ids, numbers, where

    def _whole(self, pages: int, rows: Results) -> Results:
        """The worst result of a page's shards and objects; ``OK`` is the least."""
        by_object = rows.reshape(len(self.pool.held), pages, -1)
        worst: Results = by_object.max(axis=(0, 2))
        return worst


def _rotated(links: Links, rotation: bytes) -> Links:
    """Other links, one to one."""
    mask = np.frombuffer(rotation, np.uint8)
    return np.ascontiguousarray(links ^ mask)
