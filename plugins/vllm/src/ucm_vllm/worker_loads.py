"""Worker side: loads of this rank, before their request runs or layer by layer while it computes.

A load is reported exactly once, whatever happens to it: with the blocks that did not arrive, and in
the way in which vLLM can go on (engine blocks, or the request to start over).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.blocks import NO_PAGE
from ucm_core.adapter.layers import LayerLoads, LookAhead, RowTransfer
from ucm_core.adapter.transfer import reasons
from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.store.contract import Status
from ucm_vllm.devices import Mark, nothing_queued
from ucm_vllm.lanes import Lane, Part, fence, to_load
from ucm_vllm.messages import TransferOp
from ucm_vllm.reports import Report, count_blocks
from ucm_vllm.stats import UcmStats

_log = RateLimitedLogger(logging.getLogger("ucm.vllm"))

#: Longest an idle engine step waits for a load to end; a new request arrives at most this much later.
IDLE_WAIT_S = 0.004


@dataclass(slots=True)
class _Load:
    op: TransferOp
    parts: list[Part]
    started: float
    by_layer: list[RowTransfer]


class WorkerLoads:
    """See the module text. ``lanes`` may be empty (``use_lite``): then every load fails at once.

    ``by_pages``: vLLM keeps what arrived of a failed load and goes on from the first block that did
    not. ``units``: needed for loads layer by layer. ``limit_s``: age at which a load that never ended
    is fenced. ``mark``: nothing is written before what vLLM had queued at the submission; with several
    steps in flight one of them may still use pages that were given to another request since.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        report: Report,
        stats: UcmStats,
        limit_s: float,
        by_pages: bool = True,
        units: UnitMap | None = None,
        look_ahead: LookAhead | None = None,
        mark: Mark = nothing_queued,
    ) -> None:
        self._lanes = lanes
        self._mark = mark
        self._report = report
        self._stats = stats
        self._limit_s = limit_s
        self._by_pages = by_pages
        self._units = units
        self._look_ahead = look_ahead or LookAhead()
        self._open: dict[int, _Load] = {}
        self._pipeline: LayerLoads | None = None
        self._in_step: list[_Load] = []

    def __len__(self) -> int:
        return len(self._open) + len(self._in_step)

    # -- before the request runs ---------------------------------------------------------------------

    def start(self, ops: Sequence[TransferOp]) -> None:
        """Submit one task per request and coordinate. Returns at once."""
        if not ops:
            return
        after = self._mark()
        for op in ops:
            load = self._load(op)
            for part in load.parts:
                part.transfer.load(range(part.transfer.shards), after)
            self._open[op.op_id] = load

    def _load(self, op: TransferOp) -> _Load:
        parts = to_load(self._lanes, op)
        return _Load(op, parts, time.monotonic(), [part.by_layer() for part in parts])

    def poll(self, *, idle: bool) -> None:
        """Report loads that have ended. ``idle``: wait a moment for the oldest one."""
        if not self._open:
            return
        if idle:
            # vLLM would run the next empty step at once and burn the core that the copies need.
            until = time.monotonic() + IDLE_WAIT_S
            for part in next(iter(self._open.values())).parts:
                part.transfer.is_over(max(0.0, until - time.monotonic()))
        now = time.monotonic()
        for op_id, load in list(self._open.items()):
            overdue = now - load.started > self._limit_s
            if overdue:
                fence(load.parts)
            elif not all(part.transfer.is_over() for part in load.parts):
                continue
            del self._open[op_id]
            self._end(load)
            self._report.received.add(load.op.request_id)
            if not self._by_pages and op_id in self._report.meta.bad:
                self._report.failed.add(load.op.request_id)

    # -- layer by layer --------------------------------------------------------------------------------

    def start_layered(self, ops: Sequence[TransferOp]) -> None:
        """Submit the first layers of requests that compute in this step."""
        if not ops:
            return
        assert self._units is not None, "loads layer by layer need the unit map"
        self._in_step = [self._load(op) for op in ops]
        moved = [one for load in self._in_step for one in load.by_layer]
        self._pipeline = LayerLoads(self._units, moved, self._look_ahead, self._mark())

    def wait_for_layer(self, layer: LayerKey) -> None:
        """Until what the layer reads is there, or has failed; bounded by the store's deadline."""
        if self._pipeline is not None:
            self._pipeline.wait(layer)

    def finish_layers(self) -> None:
        """The forward pass is over: report the step's loads. Idempotent."""
        if self._pipeline is None:
            return
        self._pipeline.finish()
        self._pipeline = None
        loads, self._in_step = self._in_step, []
        for load in loads:
            if any(moved.missed for moved in load.by_layer):
                _log.error(
                    "layer calls missing",
                    "vLLM computed layers of request %s without waiting for their loads (CUDA graphs that "
                    "cover attention?); the request is computed instead. Set use_layerwise to false, or "
                    "cudagraph_mode to PIECEWISE",
                    load.op.request_id,
                )
            self._end(load)

    # -- the end of a load -------------------------------------------------------------------------------

    def _end(self, load: _Load) -> None:
        op = load.op
        bad = np.zeros(len(op), dtype=bool)
        for part, moved in zip(load.parts, load.by_layer, strict=True):
            statuses = part.transfer.statuses()
            if moved.missed:
                statuses[statuses == Status.OK] = Status.CANCELLED
            bad[part.numbers[count_blocks(self._stats, "load", part, statuses)]] = True
        if not self._lanes:
            bad[:] = True
        self._stats.add("load_seconds", time.monotonic() - load.started)
        self._report.meta.loaded[op.op_id] = 1
        if bad.any():
            self._tell(load, np.flatnonzero(bad))

    def _tell(self, load: _Load, numbers: npt.NDArray[np.int64]) -> None:
        self._report.meta.bad[load.op.op_id] = numbers
        if self._by_pages:
            self._report.failed_pages.update(self._pages(load.op, numbers))
        _log.warning(
            "load failed",
            "%d of %d blocks of request %s could not be loaded%s; the engine is told",
            len(numbers),
            len(load.op),
            load.op.request_id,
            reasons((part.transfer for part in load.parts), durable=False),
        )

    def _pages(self, op: TransferOp, numbers: npt.NDArray[np.int64]) -> list[int]:
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

    def fence(self) -> None:
        """No byte moves any more; what had not ended is told as failed."""
        for load in (*self._open.values(), *self._in_step):
            fence(load.parts)

    def close(self) -> None:
        """Fence what runs."""
        self.fence()
        self._open.clear()
        self._in_step.clear()
        self._pipeline = None
