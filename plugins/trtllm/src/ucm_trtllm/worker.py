"""Worker side: moves the bytes of one rank, and says of each request exactly once that it is done.

A load copies blocks that lie verified in the arena: nothing of it can be missing or damaged. Those of
requests that wait run on a thread of their own, the others before the step computes. A save is issued when
the step has computed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucm_core.adapter.transfer import NOTHING_QUEUED, BlockTransfer, reasons
from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.store.contract import CommitMode, Status
from ucm_trtllm.arena import LOADS, SAVES, Arena
from ucm_trtllm.lanes import Lane, parts_of
from ucm_trtllm.messages import ArenaName, Metadata, Op

_log = RateLimitedLogger(logging.getLogger("ucm.trtllm"))

#: Longest a step waits for copies out of pages that the engine takes back. Past it they are fenced: those
#: blocks are not saved, which costs a later miss, never a wrong byte.
RECLAIM_WAIT_S = 1.0
#: How a stream of the engine becomes an event: (its name for the store, what must live until then).
Mark = Callable[[Any], tuple[int, object]]


def nothing_queued(stream: Any) -> tuple[int, object]:
    """Host memory: what the engine computed is there when its call returns."""
    del stream
    return NOTHING_QUEUED


def cuda_mark(index: int) -> Mark:
    """What is queued on the engine's stream of a GPU so far."""

    def mark(stream: Any) -> tuple[int, object]:
        import torch

        event = torch.cuda.Event()
        event.record(stream if stream is not None else torch.cuda.current_stream(index))
        return int(event.cuda_event), event

    return mark


@dataclass(slots=True)
class _Load:
    op: Op
    after: tuple[int, object]
    over: threading.Event = field(default_factory=threading.Event)
    error: str = ""


@dataclass(slots=True)
class _Save:
    op: Op
    parts: list[tuple[Lane, BlockTransfer]]
    started: float
    copied: bool = False


class WorkerSide:
    """See the module text. ``rank``: the rank's column in the arena. ``attach``: how the arena is mapped
    (this process's own where it made it). ``limit_s``: age at which a save that never ended is fenced."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        device: Any,
        *,
        rank: int,
        attach: Callable[[ArenaName], Arena],
        limit_s: float,
        mark: Mark = nothing_queued,
        event_sync: bool = True,
    ) -> None:
        self._lanes = list(lanes)
        self._device = device
        self._rank = rank
        self._attach = attach
        self._limit_s = limit_s
        self._mark = mark if event_sync else nothing_queued
        self._arena: Arena | None = None
        self._loads: dict[int, _Load] = {}
        self._saves: list[_Save] = []
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Requests that the engine has asked about and that were not told yet.
        self._loading: set[int] = set()
        self._ending: set[int] = set()

    # -- the step ------------------------------------------------------------------------------------

    def start(self, meta: Metadata, stream: Any) -> None:
        """Before the step computes. When it returns, what this step's requests were promised is in place."""
        if meta.arena is not None and self._arena is None:
            self._map(meta.arena)
        for request_id in meta.fences:
            self._fence(request_id)
        if not meta.loads:
            return
        after = self._mark(stream)
        for op in meta.loads:
            load = _Load(op, after)
            if op.parked:
                self._loads[op.request_id] = load
                self._send(load)
            else:
                self._copy(load)
                if load.error:
                    raise RuntimeError(load.error)

    def _map(self, name: ArenaName) -> None:
        try:
            self._arena = self._attach(name)
        except OSError as error:
            _log.error(
                "no arena",
                "the scheduler's verified blocks (%s) are out of reach for rank %d: %s. Nothing is loaded: "
                "run all ranks of a node under one user, in one container",
                name.path,
                self._rank,
                error,
            )
            return
        problem = self._device.pin(self._arena.whole)
        if problem:
            _log.warning("not pinned", "copies from host memory are slow: %s", problem)
        self._arena.attached[self._rank] = 1

    def _send(self, load: _Load) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ucm-load", daemon=True)
            self._thread.start()
        self._queue.put(load)

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            self._copy(load)

    def _copy(self, load: _Load) -> None:
        """Copy an operation's blocks into the pages of this rank; on the thread of the caller."""
        op, arena = load.op, self._arena
        try:
            for lane in self._lanes:
                for part in parts_of(op, lane):
                    assert arena is not None
                    status, errno = self._device.scatter(
                        lane.geometry,
                        lane.sources(part, arena),
                        lane.addresses(part, op.begin, op.end),
                        load.after[0],
                    )
                    if status != Status.OK:
                        load.error = (
                            f"copying {len(part)} verified blocks of request {op.request_id} into the "
                            f"engine's pages failed ({Status(status).name.lower()}, errno {errno}): the "
                            "engine has no way to hear of it, so it must not go on"
                        )
        except Exception as error:  # told to the engine by whoever asks next
            load.error = f"loading request {op.request_id} failed: {error!r}"
        finally:
            if arena is not None and not load.error:
                arena.finished(op.cell, self._rank, LOADS)
            load.over.set()

    def finish(self, meta: Metadata, stream: Any) -> None:
        """The step has computed: issue its saves, and wait for those whose pages may go at once."""
        if not meta.saves:
            return
        after = self._mark(stream)
        for op in meta.saves:
            save = _Save(op, [], time.monotonic())
            for lane in self._lanes:
                for part in parts_of(op, lane):
                    transfer = lane.save(part)
                    if transfer is not None:
                        transfer.dump(range(transfer.shards), CommitMode.AUTO, after)
                        save.parts.append((lane, transfer))
            self._saves.append(save)
        # A window's pages are given to others in the engine's next allocation.
        until = time.monotonic() + RECLAIM_WAIT_S
        for save in self._saves:
            for lane, transfer in save.parts:
                if lane.windowed:
                    transfer.wait(max(0.0, until - time.monotonic()))

    def _fence(self, request_id: int) -> None:
        """The engine has these pages back: nothing moves there when this returns."""
        load = self._loads.get(request_id)
        if load is not None:
            load.over.wait()  # a memory copy, of bounded size
            if request_id not in self._loading:
                del self._loads[request_id]
        until = time.monotonic() + RECLAIM_WAIT_S
        for save in self._saves:
            if save.op.request_id == request_id:
                for _, transfer in save.parts:
                    transfer.wait(max(0.0, until - time.monotonic()))

    # -- what has ended ------------------------------------------------------------------------------

    def finished(self, ended: Sequence[int], loading: Sequence[int]) -> tuple[list[int], list[int]]:
        """(requests that nobody reads or writes any more, requests whose loads are in place), of those that
        the engine named here or before, each once."""
        self._ending.update(int(request_id) for request_id in ended)
        self._loading.update(int(request_id) for request_id in loading)
        self._poll()
        loaded = []
        for request_id in sorted(self._loading):
            load = self._loads.get(request_id)
            if load is not None and load.over.is_set():
                if load.error:
                    raise RuntimeError(load.error)
                del self._loads[request_id]
                loaded.append(request_id)
        self._loading.difference_update(loaded)
        busy = {save.op.request_id for save in self._saves if not save.copied}
        busy |= {request_id for request_id, load in self._loads.items() if not load.over.is_set()}
        sent = sorted(self._ending - busy)
        self._ending.difference_update(sent)
        return sent, loaded

    def _poll(self) -> None:
        now, still = time.monotonic(), []
        for save in self._saves:
            overdue = now - save.started > self._limit_s
            if not save.copied and (overdue or all(t.is_over() for _, t in save.parts)):
                for _, transfer in save.parts:
                    transfer.wait(0.0)
                    transfer.kept.clear()
                save.copied = True
                if self._arena is not None and save.op.cell >= 0:
                    self._arena.finished(save.op.cell, self._rank, SAVES)
            if save.copied and (overdue or all(t.is_answered() for _, t in save.parts)):
                self._tell(save)
            else:
                still.append(save)
        self._saves = still

    def _tell(self, save: _Save) -> None:
        lost = sum(int((t.statuses(durable=True) != Status.OK).sum()) for _, t in save.parts)
        if lost:
            _log.warning(
                "save failed",
                "%d blocks of request %d were not stored%s; they are computed anew next time",
                lost,
                save.op.request_id,
                reasons((t for _, t in save.parts), durable=True),
            )

    @property
    def open(self) -> int:
        """Transfers and questions that have not ended."""
        return len(self._loads) + len(self._saves) + len(self._loading) + len(self._ending)

    def close(self) -> None:
        """Stop; fence what runs."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(10.0)
            self._thread = None
        for save in self._saves:
            for _, transfer in save.parts:
                transfer.fence()
        self._saves.clear()
        if self._arena is not None:
            with contextlib.suppress(Exception):
                self._device.unpin(self._arena.whole)
