"""Worker side: saves of this rank, in bulk or layer by layer, published at once or when released.

Every save is reported exactly once as ``copied`` (its source is free) and once as ``ended`` (its result
is final), whatever happens to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ucm_core.adapter.layers import LayerSaves
from ucm_core.adapter.transfer import reasons
from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.store.contract import CommitMode
from ucm_vllm.devices import Mark, nothing_queued
from ucm_vllm.lanes import Lane, Part, fence, to_save
from ucm_vllm.messages import TransferOp, UcmMetadata
from ucm_vllm.reports import Report, count_blocks
from ucm_vllm.stats import UcmStats

_log = RateLimitedLogger(logging.getLogger("ucm.vllm"))

#: Longest the engine waits for copies out of blocks that it wants back. Past it the copies are fenced:
#: those blocks are not saved, which costs a later miss, never a wrong byte.
RECLAIM_WAIT_S = 1.0
#: Longest wait at shutdown for copies out of the engine's memory: the last requests' blocks are theirs.
CLOSE_WAIT_S = 1.0


@dataclass(slots=True)
class _Save:
    op: TransferOp
    parts: list[Part]
    started: float
    #: Every part has been handed to its store: until then nothing about it is known.
    submitted: bool = False
    copied: bool = False


class WorkerSaves:
    """See the module text.

    ``units``: given when layers are saved as they finish. ``held_back``: blocks stay unpublished until
    the scheduler side releases their operation. ``limit_s``: age at which a save that never ended is
    fenced. ``mark``: see :data:`ucm_core.adapter.transfer.Mark`.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        report: Report,
        stats: UcmStats,
        limit_s: float,
        units: UnitMap | None = None,
        held_back: bool = False,
        mark: Mark = nothing_queued,
    ) -> None:
        self._lanes = lanes
        self._report = report
        self._stats = stats
        self._limit_s = limit_s
        self._units = units
        self._mark = mark
        self._commit = CommitMode.EXPLICIT if held_back else CommitMode.AUTO
        self._open: dict[int, _Save] = {}
        #: Saves per request whose source may still be read.
        self._reading: dict[str, int] = {}
        self._pipeline: LayerSaves | None = None

    def __len__(self) -> int:
        return len(self._open)

    def is_read(self, request_id: str) -> bool:
        """True while a copy out of the request's blocks may run."""
        return request_id in self._reading

    @property
    def reading(self) -> int:
        """Requests whose blocks may still be read."""
        return len(self._reading)

    # -- one step ----------------------------------------------------------------------------------------

    def begin(self, meta: UcmMetadata) -> None:
        """Before the step computes: free what vLLM took back, publish or drop what was held back, and
        get ready for layers that will finish. Waits only for sources that vLLM needs back."""
        self.drain(meta)
        for op_id in meta.discards:
            save = self._open.get(op_id)
            for part in save.parts if save is not None else ():
                part.lane.store.discard(part.transfer.ids)
        for op_id in meta.commits:
            save = self._open.get(op_id)
            for part in save.parts if save is not None else ():
                if len(part.transfer):
                    part.lane.store.commit(part.transfer.ids)
        if self._units is not None and meta.saves:
            parts = [part for save in self._prepare(meta.saves) for part in save.parts]
            self._pipeline = LayerSaves(
                self._units, [part.by_layer() for part in parts], self._commit, self._mark
            )

    def _prepare(self, ops: Sequence[TransferOp]) -> list[_Save]:
        saves = []
        for op in ops:
            save = _Save(op, to_save(self._lanes, op), time.monotonic())
            self._open[op.op_id] = save
            self._reading[op.request_id] = self._reading.get(op.request_id, 0) + 1
            saves.append(save)
        return saves

    def save_layer(self, layer: LayerKey) -> None:
        """A layer has computed: start copying what it completed. Never waits."""
        if self._pipeline is not None:
            self._pipeline.save(layer)

    def finish(self, meta: UcmMetadata) -> None:
        """The step has computed: submit what no layer's call has."""
        if self._pipeline is not None:
            self._pipeline.finish()
            self._pipeline = None
        elif self._units is None and meta.saves:
            after = self._mark()
            for save in self._prepare(meta.saves):
                for part in save.parts:
                    part.transfer.dump(range(part.transfer.shards), self._commit, after)
        for op in meta.saves:
            self._open[op.op_id].submitted = True

    def drain(self, meta: UcmMetadata) -> None:
        """Before this step overwrites blocks: no copy out of what vLLM took back may run on.

        That is all blocks of preempted requests, and those that a window has left behind. Waits up
        to ``RECLAIM_WAIT_S`` in all, then fences what is left.
        """
        if not (meta.preempted or meta.reclaimed) or not self._reading:
            return
        started = time.monotonic()
        preempted, reclaimed = set(meta.preempted), set(meta.reclaimed)
        for op_id, save in self._open.items():
            gone = save.op.request_id in preempted
            if save.copied or not (gone or op_id in reclaimed):
                continue
            for part in save.parts:
                if gone or part.lane.windowed:
                    part.transfer.wait(max(0.0, RECLAIM_WAIT_S - (time.monotonic() - started)))
            if gone:
                self._source_free(save)
        self._stats.add("preempt_wait_seconds", time.monotonic() - started)

    # -- results -------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Report what has been copied, and what has ended."""
        now = time.monotonic()
        for op_id, save in list(self._open.items()):
            if not save.submitted:
                continue
            overdue = now - save.started > self._limit_s
            if not save.copied:
                if overdue:
                    for part in save.parts:
                        part.transfer.wait(0.0)
                if overdue or all(part.transfer.is_over() for part in save.parts):
                    self._source_free(save)
            if save.copied and (overdue or all(p.transfer.is_answered() for p in save.parts)):
                del self._open[op_id]
                self._end(save)

    def _source_free(self, save: _Save) -> None:
        save.copied = True
        for part in save.parts:
            part.transfer.kept.clear()
        request_id = save.op.request_id
        self._report.meta.copied[save.op.op_id] = 1
        left = self._reading[request_id] - 1
        if left:
            self._reading[request_id] = left
        else:
            del self._reading[request_id]

    def _end(self, save: _Save) -> None:
        lost = []
        for part in save.parts:
            statuses = part.transfer.statuses(durable=True)
            lost.append(part.numbers[count_blocks(self._stats, "save", part, statuses)])
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
                reasons((part.transfer for part in save.parts), durable=True),
            )

    def fence(self) -> None:
        """What is still being copied is given up; what was copied is finished by the store."""
        for save in self._open.values():
            if not save.copied:
                fence(save.parts)

    def close(self) -> None:
        """Let copies end that have begun, up to ``CLOSE_WAIT_S`` in all, fence the rest, and forget. What is
        held back would never be published: it is not waited for."""
        until = time.monotonic() + CLOSE_WAIT_S
        for save in self._open.values():
            if save.submitted and not save.copied and self._commit is CommitMode.AUTO:
                for part in save.parts:
                    part.transfer.wait(max(0.0, until - time.monotonic()))
        self.fence()
        self._open.clear()
        self._reading.clear()
        self._pipeline = None
