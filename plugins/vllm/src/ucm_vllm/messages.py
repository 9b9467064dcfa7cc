"""What the scheduler side and the worker side tell each other, once per engine step.

Everything per block is a numpy array, so that a message costs the same whatever the prompt's length.
``links`` are rows of the content chain (``uint8[N, 32]``): every rank derives the ids of its own
coordinates from them with the same function the scheduler used for its lookup.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

Links = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class RowBlocks:
    """Stored blocks of one row of the spec table and the engine blocks that hold them.

    ``row``: the row's index among the rows that are stored. ``blocks[N]``: in blocks of the row;
    ``links[N]``: where each ends. ``pages`` is ``int32[N, tables, pieces]``: per block table of vLLM that
    the row's layers use, engine block ids, or ``NO_PAGE``.
    """

    row: int
    links: Links
    blocks: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.blocks)

    def only(self, rows: Rows) -> RowBlocks:
        """Some of the blocks."""
        return RowBlocks(self.row, self.links[rows], self.blocks[rows], self.pages[rows])


@dataclass(slots=True)
class TransferOp:
    """One load or save of one request, over all rows of the spec table that take part.

    Results name blocks by their number in the order of ``parts``. A load touches only tokens
    ``[begin, end)``: what lies below is others' or there already, what lies above is computed.
    ``attempt`` shifts the elected writer when an earlier one failed.
    """

    op_id: int
    request_id: str
    parts: tuple[RowBlocks, ...]
    begin: int
    end: int
    attempt: int = 0

    def __len__(self) -> int:
        """Blocks of all parts."""
        return sum(len(part) for part in self.parts)

    @property
    def offsets(self) -> list[int]:
        """Number of each part's first block."""
        return [0, *itertools.accumulate(len(part) for part in self.parts)][:-1]

    def only(self, numbers: Rows, op_id: int, attempt: int) -> TransferOp:
        """A new operation over some of the blocks, by number."""
        parts = []
        for part, offset in zip(self.parts, self.offsets, strict=True):
            mine = numbers[(numbers >= offset) & (numbers < offset + len(part))] - offset
            if len(mine):
                parts.append(part.only(mine))
        return TransferOp(op_id, self.request_id, tuple(parts), self.begin, self.end, attempt)


@dataclass(slots=True)
class UcmMetadata(KVConnectorMetadata):
    """Scheduler -> every worker.

    ``preempted``: requests whose blocks the engine is about to reuse: their saves must not read any
    more. ``reclaimed``: saves of which the engine took back blocks that a window has left behind: the
    same for the blocks of windowed rows. ``finishing``: requests whose blocks the engine holds until
    this worker reports them sent. ``idle``: this step computes nothing. ``step``: its number where
    workers hold back what it saves, else 0; ``commits`` and ``discards``: saves of earlier steps that
    are published or dropped now. ``prefetches``: blocks, without pages, that waiting requests will load.
    """

    loads: list[TransferOp] = field(default_factory=list)
    saves: list[TransferOp] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    reclaimed: list[int] = field(default_factory=list)
    finishing: list[str] = field(default_factory=list)
    idle: bool = False
    step: int = 0
    commits: list[int] = field(default_factory=list)
    discards: list[int] = field(default_factory=list)
    prefetches: list[RowBlocks] = field(default_factory=list)


class Outbox:
    """The message of the next step, while it is written. Scheduler's thread only."""

    def __init__(self) -> None:
        self.meta = UcmMetadata()
        self._last_op = 0
        self._last_step = 0

    def op_id(self) -> int:
        """A number no operation has had."""
        self._last_op += 1
        return self._last_op

    def op(
        self, request_id: str, parts: tuple[RowBlocks, ...], begin: int = 0, end: int = 0
    ) -> TransferOp:
        return TransferOp(self.op_id(), request_id, parts, begin, end)

    def held_step(self) -> int:
        """The number of the step being written; from here on workers report it."""
        if not self.meta.step:
            self._last_step += 1
            self.meta.step = self._last_step
        return self.meta.step

    def take(self) -> UcmMetadata:
        meta, self.meta = self.meta, UcmMetadata()
        return meta

    def unsent(self) -> int:
        """Entries not handed out yet."""
        meta = self.meta
        lists = (meta.loads, meta.saves, meta.finishing, meta.commits, meta.discards)
        return sum(len(one) for one in lists) + len(meta.prefetches)


def _merge(mine: dict[int, Rows], theirs: dict[int, Rows]) -> None:
    for op_id, rows in theirs.items():
        mine[op_id] = np.union1d(mine[op_id], rows) if op_id in mine else rows


def _add(mine: dict[int, int], theirs: dict[int, int]) -> None:
    for op_id, count in theirs.items():
        mine[op_id] = mine.get(op_id, 0) + count


@dataclass(slots=True)
class UcmWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers -> scheduler, aggregated over the workers of one step.

    ``copied``/``ended``: save op -> number of workers whose source is free / whose result is final.
    ``failed``: save op -> blocks that were not stored. ``loaded``: load op -> number of workers whose
    load has ended. ``bad``: load op -> blocks that did not arrive. ``steps``: step that saves are held
    back for -> number of workers that have told all failures of its loads.
    """

    copied: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    failed: dict[int, Rows] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    bad: dict[int, Rows] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> UcmWorkerMetadata:
        assert isinstance(other, UcmWorkerMetadata)
        _add(self.copied, other.copied)
        _add(self.ended, other.ended)
        _add(self.loaded, other.loaded)
        _add(self.steps, other.steps)
        _merge(self.failed, other.failed)
        _merge(self.bad, other.bad)
        return self

    def __bool__(self) -> bool:
        told = (self.copied, self.ended, self.failed, self.loaded, self.bad, self.steps)
        return any(told)
