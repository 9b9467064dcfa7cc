"""Worker side: moves the bytes of this rank's coordinates and reports what became of them.

Called by the model runner from one thread, once per step, in the order of the connector interface.
Tasks are submitted and polled; only ``drain`` and idle steps wait, bounded. Every load and
save operation is reported exactly once, whatever happens to it:

* a load: in ``finished`` (request id), with the blocks that did not arrive, and with its bad rows;
* a save: ``copied`` when its source is free, ``ended`` when its result is final.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.blocks import NO_PAGE, PageMap
from ucm_core.errors import UcmError
from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.store.contract import BlockStore, Status, Task, TaskState
from ucm_vllm.devices import Mark, nothing_queued
from ucm_vllm.identity import object_ids
from ucm_vllm.messages import RowBlocks, TransferOp, UcmMetadata, UcmWorkerMetadata
from ucm_vllm.stats import UcmStats
from ucm_vllm.store_counters import StoreWatch

_log = RateLimitedLogger(logging.getLogger("ucm.vllm"))

#: Longest the engine waits at a preemption for copies out of the blocks it wants back. Past it the
#: copies are fenced: those blocks are not saved, which costs a later miss, never a wrong byte.
PREEMPT_WAIT_S = 1.0
#: Longest an idle engine step waits for a load to end; a new request arrives at most this much later.
IDLE_WAIT_S = 0.002
#: Grace past the store's own deadline before a task that never ended is fenced from here.
DEADLINE_SLACK_S = 5.0


@dataclass(frozen=True, slots=True)
class Lane:
    """One coordinate of this rank: its row, store, ids and addresses.

    ``replica``/``replicas``: content equal on several ranks has one writer per block, elected by block
    index. ``block_bytes``: bytes of one stored block at this coordinate. ``windowed``: vLLM may take
    its blocks back while their request runs.
    """

    row: int
    store: BlockStore
    seed: bytes
    pages: PageMap
    block_bytes: int
    replica: int = 0
    replicas: int = 1
    windowed: bool = False


@dataclass(slots=True)
class _Part:
    """One lane's share of an operation: its task, and the numbers of the blocks that it covers."""

    lane: Lane
    numbers: npt.NDArray[np.int64]
    task: Task | None
    refused: Status = Status.REJECTED


@dataclass(slots=True)
class _Load:
    op: TransferOp
    parts: list[_Part]
    started: float


@dataclass(slots=True)
class _Save:
    op: TransferOp
    parts: list[_Part]
    started: float
    #: What the saves' event needs alive until their sources were read.
    keep: Any = None
    copied: bool = False


@dataclass(slots=True)
class _Report:
    """What the next collection calls will hand to vLLM."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_pages: set[int] = field(default_factory=set)
    meta: UcmWorkerMetadata = field(default_factory=UcmWorkerMetadata)


class WorkerSide:
    """See the module text. ``lanes`` may be empty (``use_lite``): then every operation ends at once.

    ``by_pages``: vLLM keeps what arrived of a failed load and goes on from the first block that did
    not, so it is told engine blocks. Else it starts the request over, and is told the request.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        timeout_s: float,
        by_pages: bool = True,
        stats: UcmStats | None = None,
        mark: Mark = nothing_queued,
    ) -> None:
        self._lanes = list(lanes)
        self._mark = mark
        self._limit_s = timeout_s + DEADLINE_SLACK_S
        self._by_pages = by_pages
        self.stats = stats if stats is not None else UcmStats()
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        #: Saves per request whose source may still be read.
        self._reading: dict[str, int] = {}
        self._finishing: set[str] = set()
        self._idle = False
        self._watch = StoreWatch({id(lane.store): lane.store for lane in lanes}.values())
        self._report = _Report()

    # -- loads -------------------------------------------------------------------------------------

    def start_loads(self, meta: UcmMetadata) -> None:
        """Submit one task per request and coordinate. Returns at once."""
        self._idle = meta.idle
        for op in meta.loads:
            self._loads[op.op_id] = _Load(op, self._submit(op, load=True), time.monotonic())

    def _submit(self, op: TransferOp, *, load: bool, event: int = 0) -> list[_Part]:
        """Hand the operation to the stores of the lanes that take part."""
        parts = []
        for blocks, offset in zip(op.parts, op.offsets, strict=True):
            for lane in self._lanes:
                if lane.row == blocks.row:
                    rows = np.arange(len(blocks)) if load else _elected(lane, op, blocks)
                    parts.append(_Part(lane, rows + offset, None, Status.OK))
                    if len(rows):
                        self._submit_part(parts[-1], op, blocks.only(rows), load, event)
        return parts

    def _submit_part(
        self, part: _Part, op: TransferOp, blocks: RowBlocks, load: bool, event: int
    ) -> None:
        lane = part.lane
        ids = np.repeat(object_ids(lane.seed, blocks.links), lane.pages.layers, axis=0)
        shards = lane.pages.shards(len(blocks))
        try:
            if load:
                at = lane.pages.addresses(blocks.pages, blocks.blocks, op.begin, op.end)
                part.task = lane.store.load(ids, shards, at)
            else:
                at = lane.pages.addresses(blocks.pages, blocks.blocks)
                part.task = lane.store.dump(ids, shards, at, event=event)
        except (UcmError, ValueError) as error:
            part.refused = Status.REJECTED
            _log.error(
                "load refused" if load else "save refused",
                "%s of %d blocks of request %s was refused by the store: %s",
                "load" if load else "save",
                len(blocks),
                op.request_id,
                error,
            )

    def _await_first_load(self) -> None:
        """A step that computes nothing waits a moment for the oldest load instead of spinning: vLLM
        would run the next empty step at once and burn the core that the copies need."""
        until = time.monotonic() + IDLE_WAIT_S
        for part in next(iter(self._loads.values())).parts:
            if part.task is not None:
                part.task.check(max(0.0, until - time.monotonic()))

    def _poll_loads(self) -> None:
        now = time.monotonic()
        for op_id in list(self._loads):
            load = self._loads[op_id]
            if not _all_checked(load.parts, overdue=now - load.started > self._limit_s):
                continue
            del self._loads[op_id]
            self._end_load(load, now)

    def _end_load(self, load: _Load, now: float) -> None:
        op = load.op
        bad = np.zeros(len(op), dtype=bool)
        for part in load.parts:
            statuses = _block_statuses(part)
            failed = statuses != Status.OK
            bad[part.numbers[failed]] = True
            self._count_failures("load_failed_blocks", statuses[failed])
            good = int(len(statuses) - failed.sum())
            self.stats.add("load_blocks", good)
            self.stats.add("load_bytes", good * part.lane.block_bytes)
        if not self._lanes:
            bad[:] = True
        self.stats.add("load_seconds", now - load.started)
        self._report.received.add(op.request_id)
        if bad.any():
            numbers = np.flatnonzero(bad)
            self._report.meta.bad[op.op_id] = numbers
            if self._by_pages:
                self._report.failed_pages.update(self._loaded_pages(op, numbers))
            else:
                self._report.failed.add(op.request_id)
            _log.warning(
                "load failed",
                "%d of %d blocks of request %s could not be loaded%s; the engine is told",
                len(numbers),
                len(bad),
                op.request_id,
                _reasons(load.parts, durable=False),
            )

    def _loaded_pages(self, op: TransferOp, numbers: npt.NDArray[np.int64]) -> list[int]:
        """Engine blocks that these blocks of a load were meant to fill; never those it had to skip."""
        found: list[int] = []
        for part in op.only(numbers, op.op_id, op.attempt).parts:
            meant = part.pages != NO_PAGE
            grid = next((lane.pages.grid for lane in self._lanes if lane.row == part.row), None)
            if grid is not None:
                starts = grid.starts(part.blocks)[:, None, :]
                meant &= (starts >= op.begin) & (starts < op.end)
            found += [int(page) for page in np.unique(part.pages[meant])]
        return found

    # -- saves -------------------------------------------------------------------------------------

    def start_saves(self, meta: UcmMetadata) -> None:
        """Submit what this step completed. The step's forward pass must be over, or queued before the mark
        that is taken here."""
        event, keep = self._mark() if meta.saves else (0, None)
        for op in meta.saves:
            parts = self._submit(op, load=False, event=event)
            self._saves[op.op_id] = _Save(op, parts, time.monotonic(), keep)
            self._reading[op.request_id] = self._reading.get(op.request_id, 0) + 1
        self._finishing.update(meta.finishing)

    def _poll_saves(self) -> None:
        now = time.monotonic()
        for op_id in list(self._saves):
            save = self._saves[op_id]
            overdue = now - save.started > self._limit_s
            if not save.copied and _all_checked(save.parts, overdue=overdue):
                self._source_free(save)
            if save.copied and (overdue or all(_ended(part) for part in save.parts)):
                del self._saves[op_id]
                self._end_save(save)

    def _source_free(self, save: _Save) -> None:
        save.copied = True
        save.keep = None
        request_id = save.op.request_id
        self._report.meta.copied[save.op.op_id] = 1
        left = self._reading[request_id] - 1
        if left:
            self._reading[request_id] = left
        else:
            del self._reading[request_id]

    def _end_save(self, save: _Save) -> None:
        lost: list[npt.NDArray[np.int64]] = []
        for part in save.parts:
            statuses = _block_statuses(part, durable=True)
            failed = statuses != Status.OK
            lost.append(part.numbers[failed])
            self._count_failures("save_failed_blocks", statuses[failed])
            good = int(len(statuses) - failed.sum())
            self.stats.add("save_blocks", good)
            self.stats.add("save_bytes", good * part.lane.block_bytes)
        op_id = save.op.op_id
        self._report.meta.ended[op_id] = 1
        numbers = np.unique(np.concatenate(lost)) if lost else np.arange(len(save.op))
        if len(numbers):
            self._report.meta.failed[op_id] = numbers
            _log.warning(
                "save failed",
                "%d of %d blocks of request %s were not stored%s; they are computed anew next time",
                len(numbers),
                len(save.op),
                save.op.request_id,
                _reasons(save.parts, durable=True),
            )

    def drain(self, meta: UcmMetadata) -> None:
        """Before this step overwrites blocks: no copy out of what vLLM took back may run on.

        That is all blocks of preempted requests, and those that a window has left behind. Waits up
        to ``PREEMPT_WAIT_S`` in all, then fences what is left.
        """
        if not (meta.preempted or meta.reclaimed) or not self._reading:
            return
        started = time.monotonic()
        preempted, reclaimed = set(meta.preempted), set(meta.reclaimed)
        for op_id, save in self._saves.items():
            gone = save.op.request_id in preempted
            if save.copied or not (gone or op_id in reclaimed):
                continue
            for part in save.parts:
                if part.task is not None and (gone or part.lane.windowed):
                    left = PREEMPT_WAIT_S - (time.monotonic() - started)
                    part.task.wait(max(0.0, left))
            if gone:
                self._source_free(save)
        self.stats.add("preempt_wait_seconds", time.monotonic() - started)

    def _count_failures(self, name: str, statuses: npt.NDArray[np.uint8]) -> None:
        if len(statuses):
            kinds, counts = np.unique(statuses, return_counts=True)
            for kind, count in zip(kinds, counts, strict=True):
                self.stats.add(name, int(count), Status(int(kind)).name.lower())

    # -- reports, once per step ----------------------------------------------------------------------

    def poll(self) -> tuple[set[str], set[str], set[str]]:
        """(sent, received, failed): requests whose held blocks are free, whose loads have ended, and
        those of them that vLLM must start over."""
        if self._loads:
            if self._idle:
                self._await_first_load()
            self._poll_loads()
        if self._saves:
            self._poll_saves()
        self._watch.look(self.stats.add)
        sent: set[str] = set()
        if self._finishing:
            sent = {r for r in self._finishing if r not in self._reading}
            self._finishing -= sent
        received, self._report.received = self._report.received, set()
        failed, self._report.failed = self._report.failed, set()
        return sent, received, failed

    def take_failed_pages(self) -> set[int]:
        """Engine blocks that loads reported by the last :meth:`poll` did not fill."""
        pages, self._report.failed_pages = self._report.failed_pages, set()
        return pages

    def take_metadata(self) -> UcmWorkerMetadata | None:
        """News for the scheduler side, or None."""
        meta = self._report.meta
        if not meta:
            return None
        self._report.meta = UcmWorkerMetadata()
        return meta

    def pending(self) -> dict[str, int]:
        """Sizes of every map, for tests and diagnosis: all zero when nothing is under way."""
        return {
            "loads": len(self._loads),
            "saves": len(self._saves),
            "reading": len(self._reading),
            "finishing": len(self._finishing),
            "received": len(self._report.received),
            "failed_pages": len(self._report.failed_pages),
        }

    def close(self) -> None:
        """Fence what runs and close the stores: saves already copied are finished by the store."""
        for load in self._loads.values():
            _fence(load.parts)
        for save in self._saves.values():
            if not save.copied:
                _fence(save.parts)
        self._loads.clear()
        self._saves.clear()
        self._reading.clear()
        for store in {id(lane.store): lane.store for lane in self._lanes}.values():
            store.close()
        self._watch = StoreWatch([])
        self._lanes = []


def _elected(lane: Lane, op: TransferOp, blocks: RowBlocks) -> npt.NDArray[np.int64]:
    """Blocks of a save that this rank writes: all of them, or its share of content equal on all."""
    if lane.replicas == 1:
        return np.arange(len(blocks))
    return np.flatnonzero((blocks.blocks + op.attempt) % lane.replicas == lane.replica)


def _all_checked(parts: list[_Part], *, overdue: bool) -> bool:
    """True when every task is over; one that overran its deadline is fenced first."""
    for part in parts:
        if part.task is not None and not part.task.check():
            if not overdue:
                return False
            part.task.wait(0.0)
    return True


def _ended(part: _Part) -> bool:
    """True when the last stage has answered for every row."""
    if part.task is None or part.task.state() is TaskState.DURABLE:
        return True
    if part.task.state() is not TaskState.FAILED:
        return False
    # One row's failure says nothing of the others yet.
    return not bool((part.task.durable_results() == Status.PENDING).any())


def _block_statuses(part: _Part, *, durable: bool = False) -> npt.NDArray[np.uint8]:
    """``uint8[rows]``: per stored block OK, or the status of its first shard that is not."""
    if part.task is None:
        return np.full(len(part.numbers), part.refused, dtype=np.uint8)
    if durable:
        results = part.task.durable_results()
        results[results == Status.PENDING] = Status.TIMEOUT  # overdue: counted as not stored
    else:
        results = part.task.wait(0.0)
    table = np.asarray(results).reshape(len(part.numbers), part.lane.pages.layers)
    first_bad = (table != Status.OK).argmax(axis=1)
    picked: npt.NDArray[np.uint8] = table[np.arange(len(table)), first_bad]
    return picked


def _reasons(parts: Sequence[_Part], *, durable: bool) -> str:
    """What the store said about the rows that failed: ``": io_error ENOSPC (No space left on device)"``."""
    said: set[tuple[int, int]] = set()
    for part in parts:
        if part.task is None:
            said.add((int(part.refused), 0))
            continue
        statuses = part.task.durable_results() if durable else part.task.wait(0.0)
        numbers = part.task.durable_errnos() if durable else part.task.errnos()
        failed = (statuses != Status.OK) & (statuses != Status.PENDING)
        pairs = np.stack([statuses[failed].astype(np.int64), numbers[failed].astype(np.int64)], 1)
        said.update((int(status), int(number)) for status, number in np.unique(pairs, axis=0))
    words = [
        Status(status).name.lower()
        + (f" {errno.errorcode.get(number, number)} ({os.strerror(number)})" if number else "")
        for status, number in sorted(said)
        if status != Status.OK
    ]
    return ": " + ", ".join(words) if words else ""


def _fence(parts: list[_Part]) -> None:
    for part in parts:
        if part.task is not None:
            part.task.cancel()
