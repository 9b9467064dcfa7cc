"""Scheduler side: what is offered to vLLM, what is loaded where, and when blocks are saved.

Used from the scheduler's thread only. Per step it costs one comparison for every scheduled request;
work per block happens once per stored block and is vectorised.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm_core.adapter.tracker import Phase, RequestTracker
from ucm_core.coordinator import HitPlan, RetentionPolicy, resolve_hit
from ucm_core.identity import ContentChain
from ucm_core.spec import SeededCoordinate
from ucm_vllm.ahead import Ahead
from ucm_vllm.events import KvEvents
from ucm_vllm.identity import Uncacheable, request_chain
from ucm_vllm.keys import BadKeys
from ucm_vllm.lookup import LookupService
from ucm_vllm.messages import Outbox, Rows, TransferOp, UcmMetadata, UcmWorkerMetadata
from ucm_vllm.modes import Modes
from ucm_vllm.placement import Placement, RowPlace
from ucm_vllm.records import LoadState, Record
from ucm_vllm.retention import StateRetention
from ucm_vllm.row_blocks import Tables, part_prints, row_blocks, to_load
from ucm_vllm.saving import Bools, Saving
from ucm_vllm.states import Offers, as_positions, state_to_load
from ucm_vllm.stats import UcmStats
from ucm_vllm.stored import StoredPrefixes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("ucm.vllm")

#: Loads a request may fail. Where vLLM goes on from the first bad block, one: it keeps what arrived.
#: Where it starts over (several groups, windows), one more with a hit that avoids the bad blocks.
ATTEMPTS, ATTEMPTS_STARTING_OVER = 1, 2


class SchedulerSide:
    """See the module text.

    ``store_of``: which of the lookup service's stores holds a coordinate. ``workers``: ranks that
    report each operation. ``modes``: how loads and saves meet compute. ``adapter_key``: LoRA request ->
    key by content. ``loads``/``saves``: what the role and the configuration allow.
    ``retention``: which states are kept; None: the default rule.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        lookups: LookupService,
        store_of: Callable[[SeededCoordinate], str],
        adapter_key: Callable[[Any], str],
        workers: int = 1,
        modes: Modes | None = None,
        loads: bool = True,
        saves: bool = True,
        persist_token_threshold: int = 0,
        prefetches: bool = False,
        events: KvEvents | None = None,
        retention: RetentionPolicy | None = None,
        stats: UcmStats | None = None,
    ) -> None:
        self._placement = placement
        self._rows = placement.rows
        self._states = placement.states
        self._places = placement.places
        self._grain = placement.grain
        self._starts_over = not placement.facts.continues_anywhere
        self._attempts = ATTEMPTS_STARTING_OVER if self._starts_over else ATTEMPTS
        self._lookups = lookups
        self._store_of = store_of
        self._adapter_key = adapter_key
        self._workers = workers
        modes = modes or Modes()
        self._layered_loads = modes.layered_loads
        self._tail_tokens = modes.tail_tokens
        self._loads = loads
        self._saves = saves
        self._threshold = persist_token_threshold
        self.events = events
        self.stats = stats if stats is not None else UcmStats()
        self.tracker = RequestTracker()
        self._records: dict[str, Record] = {}
        self._bad = BadKeys()
        self._load_states: dict[int, LoadState] = {}
        self._rotation: str | None = None
        self._outbox = Outbox()
        self._retention = (
            StateRetention(
                placement,
                policy=retention,
                store_of=store_of,
                remove=lookups.remove,
                stats=self.stats,
            )
            if placement.states
            else None
        )
        self._stored = StoredPrefixes(
            placement,
            lookups=lookups,
            store_of=store_of,
            bad=self._bad,
            stats=self.stats,
            events=events,
            retention=self._retention,
        )
        self.saving = Saving(
            placement,
            outbox=self._outbox,
            tracker=self.tracker,
            bad=self._bad,
            workers=workers,
            stored=self._are_stored,
            held_back=modes.held_back,
        )

        self._ahead = (
            Ahead(
                placement.rows,
                outbox=self._outbox,
                plan_of=lambda record: self._plan(record, record.request, 0, wait=False),
                is_waiting=self._is_waiting,
            )
            if prefetches and loads
            else None
        )

    # -- new requests and hits -----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._record(request)

    def _record(self, request: Request) -> Record:
        record = self._records.get(request.request_id)
        if record is not None and record.request is request:
            return record
        record = self._new_record(request)
        self._records[request.request_id] = record
        if self._ahead is not None and record.chain is not None:
            self._ahead.arrived(record)
        self.tracker.add(request.request_id)
        return record

    def _new_record(self, request: Request) -> Record:
        if request.num_prompt_tokens < self._threshold:
            self.stats.add("uncacheable_requests", 1, "short")
            return Record(request, None)
        try:
            chain = request_chain(request, self._grain, self._adapter_key, self._rotation)
        except Uncacheable as reason:
            self.stats.add("uncacheable_requests", 1, reason.kind)
            _log.debug("request %s is left alone: %s", request.request_id, reason)
            return Record(request, None)
        return Record(request, chain, self._attempts)

    def match(self, request: Request, local: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``local`` can be loaded; ``(None, False)``: ask later.

        Polled every step while a request waits: between lookups it costs a dictionary access.
        """
        record = self._record(request)
        if request.num_preemptions != record.epoch:
            # Taken off by a reset of running requests: vLLM asks before it tells (in the next build).
            self._preempted(record)
        if record.chain is None:
            return 0, False
        plan = self._plan(record, request, local)
        if plan is None:
            return None, False
        record.answer = plan
        if not plan.external:
            return 0, False
        self.tracker.matched(request.request_id)
        return plan.external, not self._layered_loads

    def _plan(
        self, record: Record, request: Request, local: int, *, wait: bool = True
    ) -> HitPlan | None:
        """What the engine may skip, None while the answer is not there."""
        loads = self._loads and record.attempts and not _must_compute_all(request)
        # Saves of this request that still read its old blocks: one direction at a time. What they
        # store will be a hit, so the store is asked when they have ended.
        if loads and self.tracker.open_saves(request.request_id):
            return None
        present = self._stored.look_up(record, request, wait=wait)
        if present is None:
            return None
        if not loads:
            present = self._stored.nothing()
        return resolve_hit(
            self._placement.table,
            request.num_tokens,
            {place.row.name: self._stored.offered(record, place, present) for place in self._rows},
            {
                place.row.name: as_positions(place, self._stored.offered(record, place, present))
                for place in self._states
            },
            local=local,
            alignment=self._placement.facts.alignment,
            reserve=self._tail_tokens,
        )

    def allocated(self, request: Request, tables: Tables, external: int) -> None:
        """vLLM gave blocks; ``external`` tokens of them are to be loaded (0: none)."""
        record = self._record(request)
        request_id = request.request_id
        plan = record.answer
        self._admitted(record)
        if not external or plan is None:
            self.tracker.allocated(request_id, load=False)
            return
        if external < plan.external and not self._starts_over:
            plan = record.answer = _cut(plan, external, self._rows)
        if external != plan.external or not self._begin_load(request_id):
            raise AssertionError(
                f"a load of {plan.external} tokens was promised for {request_id}; vLLM wants {external}, "
                f"and the request is {self.tracker.phase(request_id)}"
            )
        chain = record.chain if record.chain is not None else self._unknown(request)
        parts = []
        for place in self._rows:
            blocks = np.arange(*plan.load[place.row.name], dtype=np.int64)
            part = row_blocks(place, chain, blocks, tables, plan.p_star)
            parts.append(to_load(place, part, plan.local))
        parts += [state_to_load(place, chain, tables, plan.p_star) for place in self._states]
        kept = tuple(part for part in parts if len(part))
        op = self._outbox.op(request_id, kept, plan.local, plan.p_star)
        # vLLM lets others share the blocks of a synchronous load at once.
        shared = tables[0][plan.local // self._rows[0].kind.engine_block :]
        self._load_states[op.op_id] = LoadState(
            op, part_prints(self._places, op.parts), shared if self._layered_loads else ()
        )
        self._outbox.meta.loads.append(op)

    def _begin_load(self, request_id: str) -> bool:
        """Layer by layer the request runs at once, and its load ends with the step; else it waits."""
        if self._layered_loads:
            return self.tracker.can_load(request_id) and self.tracker.allocated(
                request_id, load=False
            )
        return self.tracker.allocated(request_id, load=True)

    def _unknown(self, request: Request) -> ContentChain:
        """A load that was promised before `reset` must end, and must not find what is stale now: a chain
        of which nothing is stored."""
        chain = ContentChain(self._grain, secrets.token_bytes(32))
        tokens = request.num_tokens // self._grain * self._grain
        chain.extend(np.array(request.all_token_ids[:tokens], dtype=np.int64))
        return chain

    def _admitted(self, record: Record) -> None:
        """Count the query once, as vLLM does: neither polls nor what vLLM has itself dilute the rate. And
        the blocks that the request starts from are in use, whoever had them: the store or vLLM."""
        answer = record.answer
        if answer is None or record.chain is None:
            return
        if self._retention is not None and not record.decided:
            self._retention.admitted(record, answer)
        if not record.asked:
            record.asked = True
            self.stats.add("requests", 0 if record.epoch else 1)
            self.stats.add("query_tokens", record.request.num_tokens - answer.local)
        plan, record.plan = record.plan, None
        tokens = min(answer.p_star // self._grain * self._grain, record.chain.tokens)
        if plan is not None and tokens:
            link = bytes(record.chain.links[tokens // self._grain - 1])
            told, dropped = self._lookups.used(plan, tokens, link)
            self.stats.add("touched_objects", told)
            self.stats.add("touch_dropped_objects", dropped)

    # -- one step --------------------------------------------------------------------------------------

    def build(
        self,
        output: SchedulerOutput,
        block_ids: Callable[[str], Tables | None],
        offers: Mapping[str, Offers] = MappingProxyType({}),
    ) -> UcmMetadata:
        """The step's message: loads just allocated, blocks and states that this step completes, sources
        lost. ``offers``: per request the states that vLLM keeps at a boundary."""
        self.saving.step_begins()
        for request_id in output.preempted_req_ids or ():
            preempted = self._records.get(request_id)
            if preempted is not None and preempted.request.num_preemptions != preempted.epoch:
                self._preempted(preempted)
        for request_id, count in output.num_scheduled_tokens.items():
            record = self._records.get(request_id)
            if record is None:
                continue
            self.tracker.scheduled(request_id)
            if record.chain is None or not self._saves:
                continue
            request = record.request
            # Confirmed tokens only: draft tokens are not in all_token_ids until they are accepted.
            confirmed = min(request.num_computed_tokens + count, request.num_tokens)
            due = self.saving.due(record, confirmed)
            if due or record.exposed:
                tables = block_ids(request_id)
                if tables is not None:
                    self.saving.reclaim(record, tables)
                    if due:
                        self._save(record, confirmed, tables)
        for request_id, offered in offers.items() if self._states and self._saves else ():
            self._save_states(request_id, offered)
        self.saving.take_over(self._is_alive, block_ids)
        if self._ahead is not None:
            self._ahead.step()
        meta = self._outbox.take()
        meta.idle = not output.num_scheduled_tokens
        return meta

    def _is_waiting(self, record: Record) -> bool:
        return self._is_alive(record) and record.chain is not None and not record.asked

    def _is_alive(self, record: Record) -> bool:
        return self._records.get(record.request.request_id) is record

    def _save_states(self, request_id: str, offered: Offers) -> None:
        record = self._records.get(request_id)
        if record is None or record.chain is None:
            return
        # Never of draft tokens: what is not confirmed has no place in a chain.
        confirmed = [offer for offer in offered if offer[2] <= record.request.num_tokens]
        assert self._retention is not None
        wanted = self._retention.wanted(record, confirmed)
        self._stored.extend(record, max((tokens for _, _, tokens in wanted), default=0))
        self.saving.save_states(record, wanted)

    def _save(self, record: Record, confirmed: int, tables: Tables) -> None:
        self._stored.extend(record, confirmed)
        self.saving.save(record, confirmed, tables)

    def _preempted(self, record: Record) -> None:
        self.tracker.preempted(record.request.request_id)
        record.saved = 0
        record.epoch = record.request.num_preemptions
        record.answer = None
        record.asked = False
        record.answered_at = 0.0
        self.saving.preempted(record)

    # -- news from the workers ------------------------------------------------------------------------

    def update(self, output: KVConnectorOutput) -> set[int]:
        """Aggregated news of one step. Returns engine blocks that no new request may share: they were
        loaded badly, or computed on what was, and vLLM computes them anew over some steps."""
        spoiled: set[int] = set()
        meta = output.kv_connector_worker_meta
        if meta is not None:
            assert isinstance(meta, UcmWorkerMetadata)
            spoiled = self._loads_moved(meta)
            self.saving.steps_seen(meta.steps, output.invalid_block_ids)
            self.saving.moved(meta)
        for request_id in output.finished_recving or ():
            self.tracker.load_finished(request_id)
        for request_id in output.finished_sending or ():
            self.tracker.released(request_id)
        return spoiled

    def _are_stored(self, request: Request, op: TransferOp, durable: Bools) -> None:
        if self.events is not None:
            self.events.stored(request, op, durable)
        if self._retention is not None:
            self._retention.stored(op, durable)

    def _count_hit(self, op: TransferOp, bad: Rows | None) -> None:
        """What the engine continues from: tokens before the first block that did not arrive, or none
        where it starts over."""
        end = op.end
        if bad is not None and self._starts_over:
            end = op.begin
        elif bad is not None:
            part, size = op.parts[0], self._rows[op.parts[0].row].row.block_tokens
            end = int(part.blocks[bad.min()]) * size
        self.stats.add("hit_tokens", max(0, end - op.begin))

    def _loads_moved(self, meta: UcmWorkerMetadata) -> set[int]:
        spoiled: set[int] = set()
        for op_id, numbers in meta.bad.items():
            state = self._load_states.get(op_id)
            if state is None:
                continue
            first = state.bad is None
            state.bad = numbers if state.bad is None else np.union1d(state.bad, numbers)
            self._bad.add(state.prints[numbers])
            if self._retention is not None:
                self._retention.missed(state.op, numbers)
            if self.events is not None:
                self.events.gone(state.prints[numbers])
            spoiled.update(state.pages)
            record = self._records.get(state.op.request_id)
            if record is not None and record.chain is not None:
                # Bounded: whatever a store says, vLLM computes in the end, and saves anew.
                record.attempts -= first
                record.saved = 0
                record.decided = 0  # more is computed than was thought: which states to keep, again
                self._stored.forget(record, state.prints[numbers])
        for op_id, count in meta.loaded.items():
            state = self._load_states.get(op_id)
            if state is not None:
                state.ended += count
                if state.ended >= self._workers:
                    del self._load_states[op_id]
                    # Layer by layer the request has computed, and may have ended, in this very step.
                    if self._layered_loads or state.op.request_id in self._records:
                        self._count_hit(state.op, state.bad)
        return spoiled

    # -- the end of requests ----------------------------------------------------------------------------

    def finished(self, request: Request, tables: Tables) -> bool:
        """The request ended, well or by abort. True: vLLM must keep its blocks until they are sent."""
        request_id = request.request_id
        record = self._records.pop(request_id, None)
        if record is None:
            return False
        # vLLM keeps what is in the tables, but no longer what a window has left behind.
        self.saving.reclaim(record, tables)
        if record.chain is not None and self._saves:
            self._save_last(record, tables)
        hold = self.tracker.finished(request_id)
        if hold:
            self._outbox.meta.finishing.append(request_id)
        return hold

    def _save_last(self, record: Record, tables: Tables) -> None:
        """Blocks whose last tokens were confirmed only now (asynchronous scheduling)."""
        request = record.request
        if self.tracker.phase(request.request_id) is not Phase.COMPUTING:
            return
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        confirmed = min(computed, request.num_tokens)
        if self.saving.due(record, confirmed):
            self._save(record, confirmed, tables)

    def reset(self) -> None:
        """Weights may have changed under us: nothing stored so far is offered by this process again.

        Keys get a fresh random root, so old objects stay where they are (other replicas use them) and
        are simply not found. Requests under way are neither loaded nor saved any more.
        """
        self._rotation = secrets.token_hex(16)
        for record in self._records.values():
            record.chain = None
        self._bad.clear()
        if self.events is not None:
            self.events.clear()

    def pending(self) -> dict[str, int]:
        """Sizes of every map, for tests and diagnosis: all zero when nothing is under way."""
        return {
            "records": len(self._records),
            "tracked": len(self.tracker),
            "loads": len(self._load_states),
            "exposed": sum(len(record.exposed) for record in self._records.values()),
            "unsent": self._outbox.unsent(),
            **self.saving.pending(),
        }

    def take_stats(self) -> UcmStats | None:
        """Counters since the last call."""
        if self._retention is not None:
            self._retention.count()
        if self.tracker.anomalies:
            self.stats.add("anomalies", self.tracker.anomalies)
            self.tracker.anomalies = 0
        if self.events is not None and self.events.dropped:
            self.stats.add("kv_events_dropped", self.events.dropped)
            self.events.dropped = 0
        return self.stats.take()

    def wants_steps(self) -> bool:
        """Something must reach the workers although no request needs a step."""
        return self.saving.held > 0

    def close(self) -> None:
        self._lookups.close()
        self._records.clear()


def _cut(plan: HitPlan, external: int, rows: Sequence[RowPlace]) -> HitPlan:
    """A shorter hit, as 0.33 may take of the one it was offered; for rows that need the whole prefix."""
    end = plan.local + external
    load = {}
    for place in rows:
        start, stop = plan.load[place.row.name]
        load[place.row.name] = (start, min(stop, -(-end // place.row.block_tokens)))
    return dataclasses.replace(plan, p_star=end, load=load)


def _must_compute_all(request: Request) -> bool:
    """Prompt log-probabilities need every token computed: no external hit (saving is fine)."""
    sampling = request.sampling_params
    if sampling is not None and sampling.prompt_logprobs is not None:
        return True
    return bool(request.skip_reading_prefix_cache)
