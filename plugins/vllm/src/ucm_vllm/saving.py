"""Scheduler side: which blocks are saved when, who still reads what, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.tracker import Phase, RequestTracker
from ucm_vllm.keys import BadKeys, PendingKeys
from ucm_vllm.messages import Outbox, RowBlocks, TransferOp, UcmWorkerMetadata
from ucm_vllm.placement import Place, Placement
from ucm_vllm.records import Record, SaveState
from ucm_vllm.releases import Releases
from ucm_vllm.row_blocks import (
    Tables,
    has_moved,
    part_prints,
    row_blocks,
    row_links,
    row_prints,
    to_save,
)
from ucm_vllm.states import Offers, offered_states, states_to_save

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ucm_vllm.placement import RowPlace

Bools = npt.NDArray[np.bool_]
_NONE = np.zeros(0, dtype=bool)


class Saving:
    """Saves of all requests, from the step that completes a block until every worker has ended it.

    ``workers``: ranks that report each operation. ``held_back``: what a step saves is published only when
    the workers have reported its loads. Used from the scheduler's thread only; appends to
    ``outbox``, tells ``tracker`` when a source is read and free, and ``bad`` which blocks were stored anew.
    ``stored``: called with each save that has ended and, by number, which blocks are durable.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        outbox: Outbox,
        tracker: RequestTracker,
        bad: BadKeys,
        workers: int,
        stored: Callable[[Request, TransferOp, Bools], None] | None = None,
        held_back: bool = False,
    ) -> None:
        self._rows = placement.rows
        self._places = placement.places
        self._state_places = placement.states
        self._grain = placement.grain
        self._outbox = outbox
        self._tracker = tracker
        self._bad = bad
        self._workers = workers
        self._stored = stored
        # Content equal on several ranks: a save that one of them failed is taken over by the next.
        self.replicas = placement.facts.replicas
        self._releases = Releases(workers) if held_back else None
        self._pending_keys = PendingKeys()
        self._states: dict[int, SaveState] = {}
        self._retries: list[SaveState] = []
        #: Saves of states in the message before: their blocks are vLLM's again in this step.
        self._fleeting: list[int] = []
        #: Blocks whose elected writer failed, until somebody has stored them.
        self._lost = BadKeys()

    # -- what to save ------------------------------------------------------------------------------------

    def due(self, record: Record, confirmed: int) -> bool:
        """True when the tokens up to ``confirmed`` complete a block that nobody has thought of."""
        return confirmed - record.saved >= self._grain

    def save(self, record: Record, confirmed: int, tables: Tables) -> None:
        """Issue a save of the blocks up to token ``confirmed`` that nobody has stored or is storing.

        The record's chain must reach that far.
        """
        confirmed = confirmed // self._grain * self._grain
        parts = [self._missing(record, place, confirmed, tables) for place in self._rows]
        record.saved = confirmed
        kept = tuple(part for part in parts if len(part))
        if kept:
            for op in self._by_writer(self._outbox.op(record.request.request_id, kept)):
                self._open(SaveState(record, op))
                if self._releases is not None:
                    step = self._outbox.held_step()
                    self._releases.hold(op.op_id, step, np.array(tables[0], dtype=np.int64))

    def _by_writer(self, op: TransferOp) -> list[TransferOp]:
        """Blocks that an elected writer failed, and nobody could take over in time, start with the next
        one: a rank that cannot write does not lose them for ever."""
        if not len(self._lost):
            return [op]
        again = self._lost.contains(part_prints(self._places, op.parts))
        ops = [op.only(np.flatnonzero(again), self._outbox.op_id(), 1)] if again.any() else []
        if not again.all():
            ops.append(op.only(np.flatnonzero(~again), op.op_id, 0))
        return ops

    def _missing(
        self, record: Record, place: RowPlace, confirmed: int, tables: Tables
    ) -> RowBlocks:
        """Blocks of a row in ``[saved, confirmed)`` that are neither stored nor being stored."""
        chain, size = record.chain, place.row.block_tokens
        assert chain is not None
        wanted = np.arange(record.saved // size, confirmed // size, dtype=np.int64)
        return to_save(row_blocks(place, chain, self._unstored(record, place, wanted), tables))

    def _unstored(
        self, record: Record, place: Place, wanted: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Of some blocks of a row, those that are neither stored nor being stored."""
        assert record.chain is not None
        present = record.present.get(place.row.name, _NONE)
        known = wanted < len(present)
        missing = np.ones(len(wanted), dtype=bool)
        missing[known] = ~present[wanted[known]]
        wanted = wanted[missing]
        if len(wanted):
            prints = row_prints(place, row_links(place, record.chain)[wanted])
            wanted = wanted[~self._pending_keys.contains(prints)]
        return wanted

    # -- states ------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """vLLM may give the blocks of states that were offered a step ago to others now: their copies
        must be over before it computes."""
        self._outbox.meta.reclaimed += [op for op in self._fleeting if op in self._states]
        self._fleeting = []

    def save_states(self, record: Record, offers: Offers) -> None:
        """Issue a save of the states that vLLM offers in this step and that nobody has stored or is
        storing. The record's chain must reach the last of them."""
        chain = record.chain
        assert chain is not None
        parts = []
        for place in self._state_places:
            offered = offered_states(place, offers)
            blocks = np.array(list(offered), dtype=np.int64) // place.row.block_tokens - 1
            kept = set(self._unstored(record, place, blocks).tolist())
            size = place.row.block_tokens
            states = {at: ids for at, ids in offered.items() if at // size - 1 in kept}
            if states:
                parts.append(states_to_save(place, chain, states))
        if parts:
            op = self._outbox.op(record.request.request_id, tuple(parts))
            self._open(SaveState(record, op))
            self._fleeting.append(op.op_id)

    def _open(self, state: SaveState) -> None:
        op = state.op
        self._tracker.save_opened(op.request_id)
        self._states[op.op_id] = state
        self._pending_keys.add(op.op_id, part_prints(self._places, op.parts))
        if any(self._windowed(part) for part in op.parts):
            state.record.exposed.add(op.op_id)
        self._outbox.meta.saves.append(op)

    def _windowed(self, part: RowBlocks) -> bool:
        return self._places[part.row].row.window is not None

    def take_over(
        self,
        alive: Callable[[Record], bool],
        block_ids: Callable[[str], Tables | None],
    ) -> None:
        """Blocks whose elected writer failed: the next rank that holds them writes them."""
        for state in self._retries:
            record, old = state.record, state.op
            if not alive(record) or record.epoch != state.epoch:
                continue
            if self._tracker.phase(old.request_id) is not Phase.COMPUTING:
                continue
            op = old.only(state.failed, self._outbox.op_id(), old.attempt + 1)
            if any(self._windowed(part) for part in op.parts):
                tables = block_ids(old.request_id)
                if tables is None or any(self._left_behind(part, tables) for part in op.parts):
                    continue
            self._open(SaveState(record, op))
        self._retries = []

    # -- sources -------------------------------------------------------------------------------------------

    def preempted(self, record: Record) -> None:
        """vLLM took the request's blocks: what still reads them must end before they are overwritten."""
        record.exposed.clear()
        request_id = record.request.request_id
        if self._tracker.open_saves(request_id):
            self._outbox.meta.preempted.append(request_id)

    def reclaim(self, record: Record, tables: Tables) -> None:
        """Tell the workers of saves whose source a window has left behind: vLLM gives those blocks to
        others in this very step, so their copies must be over before it computes."""
        for op_id in tuple(record.exposed):
            if any(self._left_behind(part, tables) for part in self._states[op_id].op.parts):
                self._outbox.meta.reclaimed.append(op_id)
                record.exposed.remove(op_id)

    def _left_behind(self, part: RowBlocks, tables: Tables) -> bool:
        return self._windowed(part) and has_moved(self._rows[part.row], part, tables)

    # -- held back ---------------------------------------------------------------------------------------

    def steps_seen(self, steps: Mapping[int, int], bad_pages: Set[int]) -> None:
        """Ranks reported these steps, and engine blocks whose loads failed: release what was saved in
        a step that is good on all ranks, drop what was computed on a bad block."""
        if self._releases is None:
            return
        released, dropped = self._releases.seen(steps, bad_pages)
        self._outbox.meta.commits += released
        self._outbox.meta.discards += dropped
        for op_id in dropped:
            state = self._states[op_id]
            state.dropped = True
            state.record.saved = 0
            self._pending_keys.remove(op_id)

    @property
    def held(self) -> int:
        """Saves that wait for their step, or whose release no worker has heard of."""
        meta = self._outbox.meta
        waiting = 0 if self._releases is None else len(self._releases)
        return waiting + len(meta.commits) + len(meta.discards)

    # -- news from the workers ---------------------------------------------------------------------------

    def moved(self, meta: UcmWorkerMetadata) -> None:
        """What the workers said of saves in one step."""
        for op_id, numbers in meta.failed.items():
            state = self._states.get(op_id)
            if state is not None:
                state.failed = np.union1d(state.failed, numbers)
        for op_id, count in meta.copied.items():
            state = self._states.get(op_id)
            if state is not None:
                state.copied += count
                if state.copied == self._workers:
                    state.record.exposed.discard(op_id)
                    self._tracker.save_closed(state.op.request_id)
        for op_id, count in meta.ended.items():
            state = self._states.get(op_id)
            if state is not None:
                state.ended += count
                if state.ended == self._workers:
                    del self._states[op_id]
                    self._ended(state)

    def _ended(self, state: SaveState) -> None:
        if self._releases is not None:
            self._releases.forget(state.op.op_id)
        if state.dropped:
            return
        prints = self._pending_keys.remove(state.op.op_id)
        assert prints is not None
        stored = np.ones(len(prints), dtype=bool)
        stored[state.failed] = False
        self._bad.forgive(prints[stored])
        if self.replicas > 1:
            self._lost.forgive(prints[stored])
            self._lost.add(prints[~stored])
        if self._stored is not None and state.record.chain is not None:
            self._stored(state.record.request, state.op, stored)
        if len(state.failed) and state.op.attempt + 1 < self.replicas:
            self._retries.append(state)

    def pending(self) -> dict[str, int]:
        """Sizes of every map: all zero when nothing is under way."""
        return {
            "saves": len(self._states),
            "pending_keys": len(self._pending_keys),
            "retries": len(self._retries),
            "held": self.held,
        }
