"""The names of a running model's objects: per row and coordinate, the seed of its ids."""

from __future__ import annotations

from dataclasses import dataclass

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
