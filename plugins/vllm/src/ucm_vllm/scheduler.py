"""Scheduler side: what is offered to vLLM, what is loaded where, and which blocks are saved when.

Used from the scheduler's thread only. Per step it costs one comparison for every scheduled request;
work per block happens once per stored block and is vectorised.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.tracker import Phase, RequestTracker
from ucm_core.coordinator import plan_lookup, resolve_hit
from ucm_core.identity import ContentChain
from ucm_core.spec import SeededCoordinate
from ucm_vllm.identity import Uncacheable, request_chain
from ucm_vllm.keys import BadKeys, PendingKeys, Prints, fingerprints
from ucm_vllm.lookup import Lookup, LookupService
from ucm_vllm.messages import TransferOp, UcmMetadata, UcmWorkerMetadata
from ucm_vllm.placement import Placement
from ucm_vllm.stats import UcmStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("ucm.vllm")

#: How long a lookup's answer is reused while vLLM polls a waiting request.
ANSWER_LIFE_S = 0.5

_NONE = np.zeros(0, dtype=bool)


@dataclass(slots=True)
class _Record:
    """One request. ``chain`` is None when it is not cacheable."""

    request: Request
    chain: ContentChain | None
    #: Blocks [0, saved) need no further thought: stored, being stored, or given up.
    saved: int = 0
    #: What the last lookup said, from block 0.
    present: npt.NDArray[np.bool_] = field(default_factory=lambda: _NONE)
    lookup: Lookup | None = None
    answered_at: float = 0.0
    answer: tuple[int, int] | None = None  # (local, usable tokens) promised last
    may_load: bool = True
    asked: bool = False
    #: Grows when vLLM takes the blocks away: page numbers from before mean nothing any more.
    epoch: int = 0


@dataclass(slots=True)
class _SaveState:
    """A save until every worker has ended it."""

    record: _Record
    op: TransferOp
    epoch: int
    copied: int = 0
    ended: int = 0
    failed: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class SchedulerSide:
    """See the module text.

    ``store_of``: which of the lookup service's stores holds a coordinate. ``workers``: ranks that
    report each operation. ``adapter_key``: LoRA request ->
    key by content. ``loads``/``saves``: what the role and the configuration allow.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        lookups: LookupService,
        store_of: Callable[[SeededCoordinate], str],
        adapter_key: Callable[[Any], str],
        workers: int = 1,
        loads: bool = True,
        saves: bool = True,
        persist_token_threshold: int = 0,
        stats: UcmStats | None = None,
    ) -> None:
        self._placement = placement
        self._grid = placement.grid
        self._lookups = lookups
        self._store_of = store_of
        self._adapter_key = adapter_key
        self._workers = workers
        # Content equal on several ranks: a save that one of them failed is taken over by the next.
        self._replicas = placement.facts.replicas
        self._loads = loads
        self._saves = saves
        self._threshold = persist_token_threshold
        self.stats = stats if stats is not None else UcmStats()
        self.tracker = RequestTracker()
        self._records: dict[str, _Record] = {}
        self._bad = BadKeys()
        self._pending_keys = PendingKeys()
        self._save_states: dict[int, _SaveState] = {}
        self._load_prints: dict[str, tuple[int, Prints]] = {}
        self._next_op = 1
        self._rotation: str | None = None
        self._meta = UcmMetadata()
        self._retries: list[_SaveState] = []

    # -- new requests and hits -----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._record(request)

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request.request_id)
        if record is not None and record.request is request:
            return record
        record = self._new_record(request)
        self._records[request.request_id] = record
        self.tracker.add(request.request_id)
        return record

    def _new_record(self, request: Request) -> _Record:
        if request.num_prompt_tokens < self._threshold:
            self.stats.add("uncacheable_requests", 1, "short")
            return _Record(request, None)
        try:
            chain = request_chain(
                request, self._grid.block_tokens, self._adapter_key, self._rotation
            )
        except Uncacheable as reason:
            self.stats.add("uncacheable_requests", 1, reason.kind)
            _log.debug("request %s is left alone: %s", request.request_id, reason)
            return _Record(request, None)
        return _Record(request, chain)

    def match(self, request: Request, local: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``local`` can be loaded; ``(None, False)``: ask later.

        Polled every step while a request waits: between lookups it costs a dictionary access.
        """
        record = self._record(request)
        if record.chain is None:
            return 0, False
        usable = self._usable(record, request, local)
        if usable is None:
            return None, False
        external = max(0, usable - local)
        record.answer = (local, local + external)
        if not external:
            return 0, False
        self.tracker.matched(request.request_id)
        return external, True

    def _usable(self, record: _Record, request: Request, local: int) -> int | None:
        """Tokens from the start that the engine may skip, None while the answer is not there."""
        present = self._look_up(record, request)
        if present is None:
            return None
        if not (self._loads and record.may_load) or _must_compute_all(request):
            return 0
        # Saves of this request that still read its old blocks: one direction at a time.
        if self.tracker.open_saves(request.request_id):
            return None
        assert record.chain is not None
        offered = present.copy()
        bad = self._bad.contains(fingerprints(record.chain.links[: len(offered)]))
        if bad.any():
            self.stats.add("suppressed_blocks", int((bad & offered).sum()))
            offered &= ~bad
        plan = resolve_hit(
            self._placement.table,
            request.num_tokens,
            {self._placement.row.name: offered},
            local=local,
            alignment=self._grid.engine_block,
        )
        return plan.p_star

    def _look_up(self, record: _Record, request: Request) -> npt.NDArray[np.bool_] | None:
        """Presence of every whole block of the request's tokens; None: not known yet."""
        chain = record.chain
        assert chain is not None
        now = time.monotonic()
        if record.lookup is None:
            blocks = request.num_tokens // self._grid.block_tokens
            if now < record.answered_at + ANSWER_LIFE_S and len(record.present) >= blocks:
                return record.present
            self._extend(record, blocks)
            plan = plan_lookup(self._placement.keys, chain, store_of=self._store_of)
            record.lookup = self._lookups.ask(plan)
            if not record.asked:
                record.asked = True
                self.stats.add("requests")
                self.stats.add("query_tokens", blocks * self._grid.block_tokens)
        lookup = record.lookup
        if not self._lookups.poll(lookup):
            return None
        record.lookup = None
        record.answered_at = now
        votes = lookup.votes if lookup.done.is_set() else None
        if votes is None:
            self.stats.add("lookup_failures", 1, lookup.error or "timeout")
            record.present = np.zeros(len(chain), dtype=bool)
        else:
            answer = votes.present[self._placement.row.name]
            assert not isinstance(answer, int)
            record.present = answer
        return record.present

    def _extend(self, record: _Record, blocks: int) -> None:
        """Hash the request's tokens up to ``blocks`` whole blocks; only new ones cost anything."""
        chain = record.chain
        assert chain is not None
        if len(chain) < blocks:
            end = blocks * self._grid.block_tokens
            fresh = record.request.all_token_ids[chain.tokens : end]
            chain.extend(np.array(fresh, dtype=np.int64))

    def allocated(self, request: Request, table: list[int], external: int) -> None:
        """vLLM gave blocks; ``external`` tokens of them are to be loaded (0: none)."""
        record = self._record(request)
        request_id = request.request_id
        if not external or record.chain is None or record.answer is None:
            self.tracker.allocated(request_id, load=False)
            return
        local, _ = record.answer
        if not self.tracker.allocated(request_id, load=True):
            raise AssertionError(
                f"a load was promised for {request_id}, which cannot be loaded now"
            )
        size = self._grid.block_tokens
        blocks = np.arange(local // size, -(-(local + external) // size), dtype=np.int64)
        op = self._op(record, blocks, table, local, local + external)
        self.stats.add("hit_tokens", external)
        self._load_prints[request_id] = (op.op_id, fingerprints(op.links))
        self._meta.loads.append(op)

    def _op(
        self,
        record: _Record,
        blocks: npt.NDArray[np.int64],
        table: list[int],
        begin: int = 0,
        end: int | None = None,
    ) -> TransferOp:
        """Stored blocks over the pages of ``table``; tokens outside ``[begin, end)`` are not touched."""
        assert record.chain is not None
        op_id = self._next_op
        self._next_op += 1
        last = (int(blocks[-1]) + 1) * self._grid.block_tokens if end is None else end
        pages = self._grid.pages(np.asarray(table, dtype=np.int64), blocks, last).astype(np.int32)
        links = record.chain.links[blocks]
        return TransferOp(op_id, record.request.request_id, links, blocks, pages, begin, last)

    # -- one step --------------------------------------------------------------------------------------

    def build(
        self, output: SchedulerOutput, block_ids: Callable[[str], tuple[list[int], ...] | None]
    ) -> UcmMetadata:
        """The step's message: loads just allocated, blocks that this step completes, preemptions."""
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
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
            blocks = confirmed // self._grid.block_tokens
            if blocks > record.saved:
                tables = block_ids(request_id)
                if tables is not None:
                    self._save(record, blocks, tables[0])
        if self._retries:
            self._take_over()
        meta, self._meta = self._meta, UcmMetadata()
        meta.idle = not output.num_scheduled_tokens
        return meta

    def _preempted(self, request_id: str) -> None:
        record = self._records.get(request_id)
        if record is None:
            return
        self.tracker.preempted(request_id)
        record.saved = 0
        record.epoch += 1
        record.answer = None
        record.answered_at = 0.0
        if self.tracker.open_saves(request_id):
            self._meta.preempted.append(request_id)

    def _save(self, record: _Record, blocks: int, table: list[int]) -> TransferOp | None:
        """Issue a save of the blocks up to ``blocks`` that nobody has stored or is storing."""
        self._extend(record, blocks)
        assert record.chain is not None
        wanted = np.arange(record.saved, blocks, dtype=np.int64)
        record.saved = blocks
        known = wanted < len(record.present)
        missing = np.ones(len(wanted), dtype=bool)
        missing[known] = ~record.present[wanted[known]]
        wanted = wanted[missing]
        if len(wanted):
            wanted = wanted[~self._pending_keys.contains(fingerprints(record.chain.links[wanted]))]
        if not len(wanted):
            return None
        op = self._op(record, wanted, table)
        real = (op.pages != 0).all(
            axis=1
        )  # page 0 is vLLM's null block: nothing was computed there
        if not real.all():
            op = _only(op, np.flatnonzero(real), op.op_id)
        if not len(op.blocks):
            return None
        self._open_save(record, op)
        return op

    def _open_save(self, record: _Record, op: TransferOp) -> None:
        self.tracker.save_opened(op.request_id)
        self._save_states[op.op_id] = _SaveState(record, op, record.epoch)
        self._pending_keys.add(op.op_id, fingerprints(op.links))
        self._meta.saves.append(op)

    def _take_over(self) -> None:
        """Blocks whose elected writer failed: the next rank that holds them writes them."""
        for state in self._retries:
            record, old = state.record, state.op
            alive = self._records.get(old.request_id) is record and record.epoch == state.epoch
            if not alive or self.tracker.phase(old.request_id) is not Phase.COMPUTING:
                continue
            op = _only(old, state.failed, self._next_op)
            self._next_op += 1
            op.attempt = old.attempt + 1
            self._open_save(record, op)
        self._retries = []

    # -- news from the workers ------------------------------------------------------------------------

    def update(self, output: KVConnectorOutput) -> None:
        """Aggregated news of one step; called before vLLM acts on it."""
        meta = output.kv_connector_worker_meta
        if meta is not None:
            assert isinstance(meta, UcmWorkerMetadata)
            self._loads_failed(meta)
            self._saves_moved(meta)
        for request_id in output.finished_recving or ():
            self._load_prints.pop(request_id, None)
            self.tracker.load_finished(request_id)
        for request_id in output.finished_sending or ():
            self.tracker.released(request_id)

    def _loads_failed(self, meta: UcmWorkerMetadata) -> None:
        if not meta.bad:
            return
        for request_id, (op_id, prints) in self._load_prints.items():
            rows = meta.bad.get(op_id)
            if rows is None:
                continue
            self._bad.add(prints[rows])
            record = self._records.get(request_id)
            if record is not None and record.chain is not None:
                # Never asked twice: vLLM recomputes from the first bad block on, and those blocks
                # are saved anew.
                record.may_load = False
                known = fingerprints(record.chain.links[: len(record.present)])
                record.present = record.present & ~np.isin(known, prints[rows])

    def _saves_moved(self, meta: UcmWorkerMetadata) -> None:
        for op_id, rows in meta.failed.items():
            state = self._save_states.get(op_id)
            if state is not None:
                state.failed = np.union1d(state.failed, rows)
        for op_id, count in meta.copied.items():
            state = self._save_states.get(op_id)
            if state is not None:
                state.copied += count
                if state.copied == self._workers:
                    self.tracker.save_closed(state.op.request_id)
        for op_id, count in meta.ended.items():
            state = self._save_states.get(op_id)
            if state is not None:
                state.ended += count
                if state.ended == self._workers:
                    del self._save_states[op_id]
                    self._save_ended(state)

    def _save_ended(self, state: _SaveState) -> None:
        prints = self._pending_keys.remove(state.op.op_id)
        assert prints is not None
        stored = np.ones(len(prints), dtype=bool)
        stored[state.failed] = False
        self._bad.forgive(prints[stored])
        if len(state.failed) and state.op.attempt + 1 < self._replicas:
            self._retries.append(state)

    # -- the end of requests ----------------------------------------------------------------------------

    def finished(self, request: Request, table: list[int]) -> bool:
        """The request ended, well or by abort. True: vLLM must keep its blocks until they are sent."""
        request_id = request.request_id
        record = self._records.pop(request_id, None)
        if record is None:
            return False
        if record.chain is not None and self._saves:
            self._save_last(record, table)
        hold = self.tracker.finished(request_id)
        if hold:
            self._meta.finishing.append(request_id)
        return hold

    def _save_last(self, record: _Record, table: list[int]) -> None:
        """Blocks whose last tokens were confirmed only now (asynchronous scheduling)."""
        request = record.request
        if self.tracker.phase(request.request_id) is not Phase.COMPUTING:
            return
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        blocks = min(computed, request.num_tokens) // self._grid.block_tokens
        if blocks > record.saved:
            self._save(record, blocks, table)

    def reset(self) -> None:
        """Weights may have changed under us: nothing stored so far is offered by this process again.

        Keys get a fresh random root, so old objects stay where they are (other replicas use them) and
        are simply not found. Requests under way are neither loaded nor saved any more.
        """
        self._rotation = secrets.token_hex(16)
        for record in self._records.values():
            record.chain = None
        self._bad = BadKeys()

    def pending(self) -> dict[str, int]:
        """Sizes of every map, for tests and diagnosis: all zero when nothing is under way."""
        return {
            "records": len(self._records),
            "tracked": len(self.tracker),
            "saves": len(self._save_states),
            "pending_keys": len(self._pending_keys),
            "loads": len(self._load_prints),
            "retries": len(self._retries),
            "unsent": len(self._meta.loads) + len(self._meta.saves) + len(self._meta.finishing),
        }

    def take_stats(self) -> UcmStats | None:
        """Counters since the last call."""
        if self.tracker.anomalies:
            self.stats.add("anomalies", self.tracker.anomalies)
            self.tracker.anomalies = 0
        return self.stats.take()

    def close(self) -> None:
        self._lookups.close()
        self._records.clear()


def _only(op: TransferOp, rows: npt.NDArray[np.int64], op_id: int) -> TransferOp:
    """The operation restricted to some of its rows."""
    return TransferOp(
        op_id,
        op.request_id,
        op.links[rows],
        op.blocks[rows],
        op.pages[rows],
        op.begin,
        op.end,
        op.attempt,
    )


def _must_compute_all(request: Request) -> bool:
    """Prompt log-probabilities need every token computed: no external hit (saving is fine)."""
    sampling = request.sampling_params
    if sampling is not None and sampling.prompt_logprobs is not None:
        return True
    return bool(request.skip_reading_prefix_cache)
