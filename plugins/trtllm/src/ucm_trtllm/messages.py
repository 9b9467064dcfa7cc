"""What the scheduler's side tells every rank in a step. Per block everything is arrays; it is pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Links = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


@dataclass(slots=True)
class RowPart:
    """Stored blocks of row ``row``: ``blocks[N]``, the links they end at ``[N, 32]``, the engine's pages
    ``[N, tables, pieces]`` (``NO_PAGE``: none); ``slots[N]``: where they lie in the arena (loads)."""

    row: int
    blocks: Numbers
    links: Links
    pages: Numbers
    slots: Numbers

    def __len__(self) -> int:
        return len(self.blocks)

    def only(self, keep: npt.NDArray[np.bool_]) -> RowPart:
        return RowPart(
            self.row, self.blocks[keep], self.links[keep], self.pages[keep], self.slots[keep]
        )


@dataclass(slots=True)
class Op:
    """One load or save of one request. ``cell``: where ranks count what they have finished of it. A load
    touches only tokens ``[begin, end)``; ``parked``: the request waits until the engine hears of it."""

    request_id: int
    cell: int
    parts: tuple[RowPart, ...]
    begin: int = 0
    end: int = 0
    parked: bool = False


@dataclass(frozen=True, slots=True)
class ArenaName:
    """How a rank finds the arena: a path, and the sizes that make it."""

    path: str
    ranks: int
    row_bytes: tuple[int, ...]
    row_slots: tuple[int, ...]


@dataclass(slots=True)
class Metadata:
    """``fences``: requests whose pages the engine has taken back: nothing may move there any more."""

    arena: ArenaName | None = None
    loads: list[Op] = field(default_factory=list)
    saves: list[Op] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
