"""Worker side: moves the bytes of this rank's coordinates and reports what became of them.

Called by the model runner from one thread, once per step, in the order of the connector interface:
``begin``, (``start_loads``), a call per layer, (``start_loads``), ``start_saves``, ``poll`` and the other
collections. Only four calls wait, each bounded: ``begin`` for copies out of blocks that vLLM takes back,
``wait_for_layer``, an idle ``poll``, ``close``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ucm_core.adapter.layers import LookAhead
from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.errors import UcmError
from ucm_vllm.devices import Mark, nothing_queued
from ucm_vllm.lanes import Lane
from ucm_vllm.messages import RowBlocks, UcmMetadata, UcmWorkerMetadata
from ucm_vllm.modes import Modes
from ucm_vllm.reports import Report
from ucm_vllm.stats import UcmStats
from ucm_vllm.store_counters import StoreWatch
from ucm_vllm.worker_loads import WorkerLoads
from ucm_vllm.worker_saves import WorkerSaves

_log = logging.getLogger("ucm.vllm")

#: Grace past the store's own deadline before a task that never ended is fenced from here.
DEADLINE_SLACK_S = 5.0


class WorkerSide:
    """See the module text. ``lanes`` may be empty (``use_lite``): then every operation ends at once.

    ``units``: when what of this rank moves, ``keys``: vLLM's layer names in its words; both are needed
    where something moves layer by layer. ``by_pages``: see :class:`~ucm_vllm.worker_loads.WorkerLoads`.
    ``mark``: the end of what vLLM has queued so far.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        timeout_s: float,
        modes: Modes | None = None,
        units: UnitMap | None = None,
        keys: Mapping[str, LayerKey] | None = None,
        by_pages: bool = True,
        stats: UcmStats | None = None,
        mark: Mark = nothing_queued,
    ) -> None:
        modes = modes or Modes()
        self.stats = stats if stats is not None else UcmStats()
        self.lanes = list(lanes)
        self._layered_loads = modes.layered_loads
        self._keys = dict(keys or {}) if modes.layered_saves else {}
        self._idle = False
        self._finishing: set[str] = set()
        self._report = Report()
        limit_s = timeout_s + DEADLINE_SLACK_S
        self.loads = WorkerLoads(
            self.lanes,
            report=self._report,
            stats=self.stats,
            limit_s=limit_s,
            by_pages=by_pages,
            units=units,
            look_ahead=LookAhead(modes.look_ahead),
            mark=mark,
        )
        self.saves = WorkerSaves(
            self.lanes,
            report=self._report,
            stats=self.stats,
            limit_s=limit_s,
            units=units if modes.layered_saves else None,
            held_back=modes.held_back,
            mark=mark,
        )
        self._watch = StoreWatch({id(lane.store): lane.store for lane in self.lanes}.values())

    # -- one step --------------------------------------------------------------------------------------

    def begin(self, meta: UcmMetadata) -> None:
        """First call of a step, before anything in the engine's memory is overwritten."""
        self._idle = meta.idle
        self.saves.begin(meta)

    def start_loads(self, meta: UcmMetadata) -> None:
        """Submit the step's loads, and what should move up a tier. Returns at once."""
        if self._layered_loads:
            self.loads.start_layered(meta.loads)
        else:
            self.loads.start(meta.loads)
        for blocks in meta.prefetches:
            self._prefetch(blocks)

    def _prefetch(self, blocks: RowBlocks) -> None:
        for lane in self.lanes:
            if lane.row == blocks.row:
                try:
                    lane.store.prefetch(lane.ids(blocks))
                    self.stats.add("prefetched_blocks", len(blocks))
                except UcmError as error:  # a hint: without it the load only starts later
                    _log.debug("prefetch of %d blocks: %s", len(blocks), error)

    def wait_for_layer(self, name: str) -> None:
        """A layer is about to compute."""
        key = self._keys.get(name)
        if key is not None:
            self.loads.wait_for_layer(key)

    def save_layer(self, name: str) -> None:
        """A layer has computed."""
        key = self._keys.get(name)
        if key is not None:
            self.saves.save_layer(key)

    def start_saves(self, meta: UcmMetadata) -> None:
        """The step's forward pass is over, or queued before the mark that is taken here: submit what no
        layer's call has."""
        self.loads.finish_layers()
        self.saves.finish(meta)
        self._finishing.update(meta.finishing)

    # -- reports, once per step ----------------------------------------------------------------------

    def poll(self, meta: UcmMetadata) -> tuple[set[str], set[str], set[str]]:
        """(sent, received, failed): requests whose held blocks are free, whose loads have ended, and
        those of them that vLLM must start over."""
        self.loads.finish_layers()  # with speculation vLLM collects before it tells that the pass is over
        self.loads.poll(idle=self._idle)
        self.saves.poll()
        self._watch.look(self.stats)
        if meta.step:
            self._report.meta.steps[meta.step] = 1
        sent = {request for request in self._finishing if not self.saves.is_read(request)}
        self._finishing -= sent
        received, failed = self._report.take_requests()
        return sent, received, failed

    def take_failed_pages(self) -> set[int]:
        """Engine blocks that loads reported by the last :meth:`poll` did not fill."""
        return self._report.take_pages()

    def take_metadata(self) -> UcmWorkerMetadata | None:
        """News for the scheduler side, or None."""
        return self._report.take_meta()

    def pending(self) -> dict[str, int]:
        """Sizes of every map, for tests and diagnosis: all zero when nothing is under way."""
        return {
            "loads": len(self.loads),
            "saves": len(self.saves),
            "reading": self.saves.reading,
            "finishing": len(self._finishing),
            "received": len(self._report.received),
            "failed_pages": len(self._report.failed_pages),
        }

    def fence(self) -> None:
        """No byte of the engine's memory is read or written after this; what ran is told by the polls."""
        self.loads.fence()
        self.saves.fence()

    def close(self) -> None:
        """Fence what runs and close the stores: saves already copied are finished by the store."""
        self.loads.close()
        self.saves.close()
        for store in {id(lane.store): lane.store for lane in self.lanes}.values():
            store.close()
        self._watch = StoreWatch([])
        self.lanes.clear()
