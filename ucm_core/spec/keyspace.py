"""The names of a running model's objects: per row and coordinate, the seed of its ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucm_core import _native
from ucm_core.identity import ContentChain, Ids, ModelIdentity
from ucm_core.spec.coordinates import Coordinate, Stages, check_stages, coordinates, whole
from ucm_core.spec.group import GroupSpec
from ucm_core.spec.kinds import STORED
from ucm_core.spec.table import SpecTable


@dataclass(frozen=True, slots=True)
class SeededCoordinate:
    """A coordinate of a row with the seed (32 bytes) of its objects."""

    row: GroupSpec
    coordinate: Coordinate
    seed: bytes


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    """What a snapshot is known by: its row, its position in tokens, and the link (32 bytes) of the
    content chain that ends there. One id per coordinate of the row follows from it."""

    group: str
    position: int
    link: bytes


class KeySpace:
    """Built once at start from table, identity and placement; immutable, any thread may read it.

    ``stages``: layers of each PP stage per part (default: one stage). ``slices``: the namespace's
    ``head_slices``. Raises ConfigError or UnsupportedError where they do not fit the table.
    """

    __slots__ = ("_by_row", "table")

    def __init__(
        self,
        table: SpecTable,
        identity: ModelIdentity,
        *,
        stages: Stages | None = None,
        slices: int = 1,
    ) -> None:
        stages = whole(table) if stages is None else stages
        check_stages(table, stages)
        self.table = table
        self._by_row = {
            row.name: tuple(
                SeededCoordinate(row, at, identity.group(row.facts, at.layers, at.heads).seed())
                for at in coordinates(row, stages, slices)
            )
            for row in table.rows
            if row.kind in STORED
        }

    def of(self, row: str) -> tuple[SeededCoordinate, ...]:
        """All coordinates of a stored row. Raises KeyError for a row that stores nothing."""
        return self._by_row[row]

    def block_ids(
        self, at: SeededCoordinate, chain: ContentChain, start: int = 0, stop: int | None = None
    ) -> Ids:
        """``uint8[k, 16]``: ids of the row's blocks ``[start, stop)`` (in blocks of the row)."""
        per_block = at.row.block_tokens // self.table.grain
        return chain.object_ids(at.seed, start, stop, links_per_block=per_block)

    def snapshot_ids(self, key: SnapshotKey) -> Ids:
        """``uint8[k, 16]``: the ids of one snapshot, in the order of :meth:`of`."""
        seeds = [at.seed for at in self.of(key.group)]
        ids: Ids = np.empty((len(seeds), 16), np.uint8)
        link = np.frombuffer(key.link, np.uint8).reshape(1, 32)
        where = np.array([key.position], np.uint64)
        for i, seed in enumerate(seeds):
            _native.hash.snapshot_ids(seed, link, where, ids[i : i + 1])
        return ids
