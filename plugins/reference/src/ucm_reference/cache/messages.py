"""What the scheduler side and the ranks tell each other, once a step. Per block everything is arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Links = npt.NDArray[np.uint8]
Blocks = npt.NDArray[np.int64]


@dataclass(slots=True)
class RowPart:
    """Stored blocks of one row: ``blocks[N]``, the links they end at ``[N, 32]``, pages ``[N, pieces]``
    of the request (0: no memory there)."""

    blocks: Blocks
    links: Links
    pages: npt.NDArray[np.int64]

    def only(self, keep: npt.NDArray[np.bool_]) -> RowPart:
        return RowPart(self.blocks[keep], self.links[keep], self.pages[keep])


@dataclass(slots=True)
class StatePart:
    """The state after ``position`` tokens of the prefix that ends in ``link``, in engine slot ``slot``."""

    position: int
    link: bytes
    slot: int


@dataclass(slots=True)
class Transfer:
    """One load or save of one request. ``own_slot``: the state's slot is the connector's to give back.
    ``attempt``: writers of content equal on several ranks that failed before."""

    op_id: int
    request_id: str
    rows: dict[str, RowPart]
    state: StatePart | None = None
    own_slot: bool = False
    attempt: int = 0


@dataclass(slots=True)
class Message:
    """Scheduler -> every rank. ``commits``, ``discards``: saves of earlier steps that were held back."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    discards: list[int] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    idle: bool = False


@dataclass(slots=True)
class Bad:
    """What of a transfer did not work: row -> indices of its blocks; ``state``: rows of snapshots."""

    rows: dict[str, Blocks] = field(default_factory=dict)
    state: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.rows or self.state)

    def merge(self, other: Bad) -> None:
        for name, found in other.rows.items():
            mine = self.rows.get(name)
            self.rows[name] = found if mine is None else np.union1d(mine, found)
        self.state |= other.state


@dataclass(slots=True)
class Report:
    """One rank -> scheduler: operations by id. ``loaded`` and ``ended`` with what failed of them;
    ``copied``: saves whose source is free."""

    loaded: dict[int, Bad] = field(default_factory=dict)
    copied: list[int] = field(default_factory=list)
    ended: dict[int, Bad] = field(default_factory=dict)
