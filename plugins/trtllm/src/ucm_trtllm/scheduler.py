"""Scheduler side: what is offered, what is loaded where, and when blocks are saved.

One object per process that schedules; the engine calls it from its executor's thread. Per step it costs a
few array operations for each request that completes a stored block, and one comparison for the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ucm_core.adapter.blocks import NO_PAGE
from ucm_core.identity import ContentChain
from ucm_core.observe.logs import RateLimitedLogger
from ucm_trtllm.arena import CELLS, LOADS, SAVES, Arena
from ucm_trtllm.identity import AdapterKeys, Uncacheable, request_chain, token_array
from ucm_trtllm.messages import Metadata, Numbers, Op, RowPart
from ucm_trtllm.placement import Place, Placement
from ucm_trtllm.records import Record
from ucm_trtllm.staging import Promise, Stager

_log = RateLimitedLogger(logging.getLogger("ucm.trtllm"))
_plain = logging.getLogger("ucm.trtllm")

#: Seconds between two lines that say what was asked and given.
TELL_S = 60.0
#: ``promise_loads: auto``: loads up to this size run in the step that computes the request.
SYNC_BYTES = 8 << 20


class SchedulerSide:
    """See the module text. ``whole_prompts``: the engine takes all of a promise (V1), perhaps not all (V2).
    ``loads``: ``promise_loads``; ``takes_hits``: the engine uses what it is promised. ``threshold``: shorter
    prompts are left alone. ``lite``: look up, but load and save nothing."""

    def __init__(
        self,
        placement: Placement,
        stager: Stager,
        arena: Arena,
        *,
        whole_prompts: bool = True,
        loads: str = "auto",
        takes_hits: bool = True,
        threshold: int = 0,
        lite: bool = False,
    ) -> None:
        self._placement = placement
        self._stager = stager
        self._arena = arena
        self._whole_prompts = whole_prompts
        self._loads = loads
        self._takes_hits = takes_hits
        self._threshold = threshold
        self._lite = lite
        self._adapters = AdapterKeys()
        self._records: dict[int, Record] = {}
        #: Records whose pins end when every rank has copied.
        self._copying: list[Record] = []
        #: Requests that are gone while ranks still work for them: their cell and pins stay.
        self._ending: list[Record] = []
        self._cells = list(range(CELLS))
        self._outbox = Metadata()
        self._warned = False
        self._told = (time.monotonic(), 0)

    # -- a request arrives -----------------------------------------------------------------------------

    def match(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens beyond ``computed`` lie verified in host memory, and whether the request has to
        wait while they are copied."""
        self._settle()
        request_id = int(request.request_id)
        before = self._records.pop(request_id, None)
        if before is not None:  # its allocation is gone, and it starts over
            self._withdraw(before)
        tokens = token_array(request.get_tokens(0))
        record = Record(request_id, self._chain(request, len(tokens)), prompt=len(tokens))
        self._records[request_id] = record
        if record.chain is None:
            return 0, False
        record.chain.extend(tokens)
        record.tokens = len(tokens)
        if not self._may_load(request, computed, record):
            return 0, False
        promise, record.stored = self._stager.promise(record.chain, len(tokens), computed)
        if promise is None:
            return 0, False
        if self._lite or not self._admit(record):
            self._stager.release(promise)
            return 0, False
        record.promise, plan = promise, promise.plan
        record.begin, record.end = plan.local, plan.p_star
        record.parked = self._waits(promise)
        return plan.external, record.parked

    def _chain(self, request: Any, tokens: int) -> ContentChain | None:
        if tokens < self._threshold or bool(getattr(request, "is_dummy_request", False)):
            return None
        try:
            return request_chain(request, self._placement.grain, self._adapters)
        except Uncacheable as reason:
            _log.log(
                logging.INFO,
                "left alone",
                "request %s is left alone: %s",
                request.request_id,
                reason,
            )
            return None

    def _may_load(self, request: Any, computed: int, record: Record) -> bool:
        if getattr(request, "return_context_logits", False) or getattr(
            request, "py_return_context_logits", False
        ):
            return False  # every token of the prompt must be computed
        if any(other.request_id == record.request_id for other in self._ending):
            return False  # its old pages are still being read or written: one direction at a time
        if not self._takes_hits or not bool(self._arena.attached.all()):
            return False
        if computed % self._placement.alignment:
            if not self._warned:
                self._warned = True
                _plain.warning(
                    "the engine matched %d tokens, inside a block of %d: such matches get nothing from UCM; "
                    "set kv_cache_config.enable_partial_reuse: false",
                    computed,
                    self._placement.alignment,
                )
            return False
        return True

    def _waits(self, promise: Promise) -> bool:
        if self._loads != "auto":
            return self._loads == "async"
        sizes = self._arena.name.row_bytes
        return sum(sizes[row] * len(slots) for row, slots in promise.slots.items()) > SYNC_BYTES

    def _admit(self, record: Record) -> bool:
        """A cell for what ranks will do for the request; there is none while some rank cannot count."""
        free = self._cells and not record.saves and bool(self._arena.attached.all())
        if record.cell < 0 and free:
            record.cell = self._cells.pop()
            self._arena.cells[record.cell] = 0
        return record.cell >= 0

    # -- pages are there -------------------------------------------------------------------------------

    def allocated(self, request: Any, lists: Sequence[Sequence[int]]) -> None:
        """The engine gave pages; ``lists`` by layer group. Perhaps fewer than the promise needs."""
        record = self._records.get(int(request.request_id))
        if record is None:
            return
        record.set_tables(lists)
        promise, record.promise = record.promise, None
        if promise is None:
            return
        covered = min(
            len(record.tables[t]) for place in self._placement.places for t in place.tables
        )
        end = record.end = min(record.end, covered * self._placement.alignment)
        parts: list[RowPart] = []
        if end > record.begin:
            places = self._placement.places
            parts = [self._to_load(record, places[row], promise, end) for row in promise.slots]
        record.pinned = promise
        self._copying.append(record)
        if parts or record.parked:
            record.loads += 1
            kept = tuple(part for part in parts if len(part))
            op = Op(record.request_id, record.cell, kept, record.begin, end, record.parked)
            self._outbox.loads.append(op)

    def cancelled(self, request: Any, start: int, end: int) -> None:
        """The engine will not take tokens ``[start, end)`` of what it was promised."""
        record = self._records.get(int(request.request_id))
        if record is None or record.promise is None or end <= start:
            return
        page = self._placement.alignment
        if start <= record.begin:
            record.begin = min(record.end, max(record.begin, end // page * page))
        elif end >= record.end:
            record.end = max(record.begin, start // page * page)

    def _to_load(self, record: Record, place: Place, promise: Promise, end: int) -> RowPart:
        blocks, slots = promise.blocks[place.index], promise.slots[place.index]
        size = place.row.block_tokens
        keep = (blocks * size < end) & ((blocks + 1) * size > record.begin)
        part = self._part(record, place, blocks[keep])
        part.slots = slots[keep]
        return part

    def _part(self, record: Record, place: Place, blocks: Numbers) -> RowPart:
        assert record.chain is not None
        per = place.row.block_tokens // self._placement.grain
        links = record.chain.links[(blocks + 1) * per - 1]
        pages = [_pages_of(place, record.tables[table], blocks) for table in place.tables]
        nowhere: Numbers = np.zeros(len(blocks), np.int64)
        return RowPart(place.index, blocks, links, np.stack(pages, axis=1), nowhere)

    # -- one step --------------------------------------------------------------------------------------

    def build(self, output: Any) -> Metadata:
        """The step's message. ``output``: the engine's ``SchedulerOutput``."""
        self._settle()
        self._stager.poll()
        self._tell()
        for data in output.new_requests:
            record = self._records.get(int(data.request_id))
            if record is not None:
                self._first(record, data)
        for data in output.cached_requests:
            record = self._records.get(int(data.request_id))
            if record is not None:
                self._next(record, data)
        meta, self._outbox = self._outbox, Metadata()
        if not bool(self._arena.attached.all()):
            meta.arena = self._arena.name
        return meta

    def _tell(self) -> None:
        """Now and then what operators want to see, when there is news."""
        counts, now = self._stager.counts, time.monotonic()
        if now - self._told[0] < TELL_S or counts.asked_tokens == self._told[1]:
            return
        self._told = (now, counts.asked_tokens)
        _plain.info(
            "UCM: %d tokens asked for, %d given; %d blocks read and verified, %d missing or damaged, "
            "%d without room",
            counts.asked_tokens,
            counts.promised_tokens,
            counts.staged,
            counts.failed,
            counts.refused,
        )

    def _first(self, record: Record, data: Any) -> None:
        """The engine names all tokens and pages of a request it has not named before. Its position is
        without the promised tokens, unless the request had to wait for them."""
        if record.seen:  # it was taken back, and nobody told: its saves start anew
            record.saved = 0
        record.seen = True
        record.set_tables(_lists(data))
        if record.chain is None:
            return
        self._learn(record, data.new_tokens, record.tokens)
        external = record.end - record.begin if record.end > record.begin else 0
        known = not record.parked and self._whole_prompts
        begin = int(data.computed_position) + (external if known else 0)
        self._save(record, begin + int(data.num_scheduled_tokens), max(begin, record.end))

    def _next(self, record: Record, data: Any) -> None:
        position = int(data.computed_position)
        record.distrust(position, self._placement.alignment)
        record.drafted |= position >= record.prompt and int(data.num_scheduled_tokens) > 1
        record.extend_tables(_lists(data))
        if record.chain is None:
            return
        self._learn(record, data.new_tokens, 0)
        self._save(record, position + int(data.num_scheduled_tokens), position)

    def _learn(self, record: Record, tokens: Sequence[int], known: int) -> None:
        """Tokens beyond the ``known`` first of these are new."""
        if len(tokens) > known:
            assert record.chain is not None
            record.chain.extend(token_array(tokens[known:]))
            record.tokens += len(tokens) - known

    def _save(self, record: Record, end: int, position: int) -> None:
        """Issue a save of blocks whose tokens are confirmed when this step has run. Drafts are not: what
        the engine schedules beyond the tokens it has told counts for nothing."""
        grain = self._placement.grain
        confirmed = min(end, record.tokens) // grain * grain
        if confirmed <= record.saved or self._lite:
            return
        parts = [
            self._to_save(record, place, confirmed, position) for place in self._placement.places
        ]
        record.saved = confirmed
        kept = tuple(part for part in parts if len(part))
        if kept:
            self._admit(record)
            record.saves += 1
            self._outbox.saves.append(Op(record.request_id, record.cell, kept))

    def _to_save(self, record: Record, place: Place, confirmed: int, position: int) -> RowPart:
        size = place.row.block_tokens
        wanted = np.arange(record.saved // size, confirmed // size, dtype=np.int64)
        if place.row.window is not None:
            # Pages that the window has passed when the step begins are others' already, and nobody told.
            passed = position - place.row.window + place.page.tokens
            wanted = wanted[wanted * size >= passed]
        stored = record.stored.get(place.row.follows or place.row.name)
        if stored is not None:
            known = wanted < len(stored)
            missing = np.ones(len(wanted), np.bool_)
            missing[known] = ~stored[wanted[known]]
            wanted = wanted[missing]
        part = self._part(record, place, wanted)
        return part.only((part.pages != NO_PAGE).all(axis=(1, 2)))

    # -- the end of a request ----------------------------------------------------------------------------

    def finished(self, request: Any) -> bool:
        """The request ended. True: the engine must keep its pages until every rank says that nobody moves
        bytes there."""
        record = self._records.pop(int(request.request_id), None)
        return record is not None and self._retire(record)

    def reset(self, request: Any) -> None:
        """The request's pages are gone already, and it will start over."""
        record = self._records.pop(int(request.request_id), None)
        if record is not None:
            self._withdraw(record)

    def _withdraw(self, record: Record) -> None:
        if self._retire(record):
            self._outbox.fences.append(record.request_id)

    def _retire(self, record: Record) -> bool:
        """Forget a request, or keep what ranks still work on. True: they do."""
        if record.promise is not None:
            self._stager.release(record.promise)
            record.promise = None
        if record.cell < 0:  # nobody counts for it: the engine has to ask the ranks
            return record.saves > 0
        busy = not self._is_done(record)
        if record.pinned is None and not busy:
            self._free(record)
        else:
            self._ending.append(record)
        return busy

    def _is_done(self, record: Record) -> bool:
        least = self._arena.least
        return (
            least(record.cell, LOADS) >= record.loads and least(record.cell, SAVES) >= record.saves
        )

    def _free(self, record: Record) -> None:
        if record.cell >= 0:
            self._cells.append(record.cell)
            record.cell = -1

    def _settle(self) -> None:
        """Let go of what every rank has copied, and of requests that nobody works on any more."""
        if self._copying:
            still = []
            for record in self._copying:
                if (
                    record.pinned is not None
                    and self._arena.least(record.cell, LOADS) >= record.loads
                ):
                    self._stager.release(record.pinned)
                    record.pinned = None
                elif record.pinned is not None:
                    still.append(record)
            self._copying = still
        if self._ending:
            over = [r for r in self._ending if r.pinned is None and self._is_done(r)]
            for record in over:
                self._free(record)
            self._ending = [r for r in self._ending if r.cell >= 0]

    def pending(self) -> dict[str, int]:
        """Sizes of every map: all zero when nothing is under way."""
        self._settle()
        self._stager.poll()
        return {
            "records": len(self._records),
            "ending": len(self._ending),
            "copying": len(self._copying),
            "cells": CELLS - len(self._cells),
            "pinned": sum(residents.pinned for residents in self._stager.residents),
            "reading": self._stager.under_way,
        }


def _lists(data: Any) -> Sequence[Sequence[int]]:
    """Pages by layer group, in the form of either generation."""
    grouped = getattr(data, "new_block_ids_by_layer_group", None)
    if not grouped:
        return [data.new_block_ids]
    if isinstance(grouped, Mapping):
        return [grouped.get(number, ()) for number in range(max(grouped) + 1)]
    found: Sequence[Sequence[int]] = grouped
    return found


def _pages_of(place: Place, table: Numbers, blocks: Numbers) -> Numbers:
    """``int64[N, pieces]``; what the table does not reach has no page."""
    if not len(blocks):
        return np.zeros((0, place.grid.pieces), np.int64)
    needed = -(-(int(blocks.max()) + 1) * place.row.block_tokens // place.page.tokens)
    if len(table) < needed:
        table = np.concatenate([table, np.full(needed - len(table), NO_PAGE, np.int64)])
    return place.grid.pages(table, blocks)
