"""Continuous batching: what runs in the next step, and who gets which memory.

Requests that decode come first (one token and drafts each), then prompts in chunks, then new requests.
When memory runs out the youngest running request is preempted: its memory is taken, it starts over.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ucm_reference.batch import Span
from ucm_reference.blocks import BlockPool
from ucm_reference.connector import News, SchedulerConnector, Snapshot, StepView
from ucm_reference.drafts import Drafter
from ucm_reference.memory import Sizes
from ucm_reference.model import STATEFUL, Model
from ucm_reference.request import Phase, Request

Answers = Mapping[str, Sequence[tuple[int, str]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """``tokens``: computed in one step; ``requests``: running or loading at once. ``boundary``: a state
    is kept at the last multiple of it (0: none)."""

    tokens: int = 256
    requests: int = 8
    boundary: int = 128


@dataclass(slots=True)
class Step:
    """Spans to compute, the connector's view, and memory that became free (for poison): ``freed`` before
    this step, ``taken`` from requests preempted by it, which a connector may read until ``start_load``."""

    spans: list[Span] = field(default_factory=list)
    view: StepView = field(default_factory=StepView)
    freed: dict[str, list[int]] = field(default_factory=dict)
    taken: dict[str, list[int]] = field(default_factory=dict)


class Scheduler:
    """See the module text. One thread."""

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        limits: Limits,
        connector: SchedulerConnector | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.model, self.sizes, self.limits = model, sizes, limits
        self.connector, self.drafter = connector, drafter
        #: Groups with a block table of their own -> window.
        self.groups = {
            row.name: row.window
            for row in model.rows
            if row.kind in ("full", "latent", "compressed")
        }
        self.stateful = any(row.kind in STATEFUL for row in model.rows)
        self._pools = {name: BlockPool(sizes.pages) for name in self.groups}
        self._slots = BlockPool(sizes.slots)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loading: dict[str, Request] = {}
        self._held: dict[str, Request] = {}
        self._freed: dict[str, list[int]] = {}
        self._spans: dict[str, Span] = {}
        self._step = Step()
        self.preemptions = 0
        self.rejected_drafts = 0
        self.accepted_drafts = 0
        self.skipped_snapshots = 0

    # -- requests ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        if len(request.prompt) + request.max_tokens > self.model.max_tokens:
            raise ValueError(
                f"request {request.request_id!r} is longer than {self.model.max_tokens}"
            )
        request.added_at, request.added_cpu = time.perf_counter(), time.process_time()
        self._waiting.append(request)
        if self.connector is not None:
            self.connector.added(request)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown ones are fine."""
        for request in (*self._waiting, *self._running, *self._loading.values()):
            if request.request_id == request_id:
                self._end(request, Phase.ABORTED)
                return

    @property
    def busy(self) -> bool:
        """Something waits, runs, loads, or still holds memory for a connector."""
        return bool(self._waiting or self._running or self._loading or self._held)

    @property
    def running(self) -> Sequence[Request]:
        return self._running

    def progress(self) -> tuple[int, ...]:
        """Numbers that change whenever anything moves."""
        computed = sum(request.computed for request in self._running)
        produced = sum(len(request.tokens) for request in self._running)
        sizes = (len(self._waiting), len(self._running), len(self._loading), len(self._held))
        return (*sizes, computed, produced, self.preemptions)

    def memory_in_use(self) -> dict[str, int]:
        """Blocks and slots that are out: all zero when nothing is under way."""
        used = {name: self.sizes.pages - 1 - pool.free for name, pool in self._pools.items()}
        return {**used, "slots": self.sizes.slots - 1 - self._slots.free}

    # -- one step --------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Choose the work of a step. Memory freed before is free for it."""
        self._step = Step()
        self._spans = {}
        for request in self._running:
            self._drop_windows(request)
        budget = self.limits.tokens
        for request in sorted(self._running, key=lambda r: len(r.tokens) - r.computed > 1):
            if budget > 0 and request.phase is Phase.RUNNING:
                budget -= self._advance(request, budget)
        while budget > 0 and self._waiting and self._active() < self.limits.requests:
            if self._step.view.preempted:
                break  # whoever lost memory comes first, in a later step
            used = self._admit(self._waiting[0], budget)
            if used is None:
                break
            budget -= used
        step = self._step
        step.spans = list(self._spans.values())
        step.view.idle = not step.spans
        step.freed, self._freed = self._freed, {}
        for name, blocks in step.taken.items():  # what a load writes already stays as it is
            step.taken[name] = [block for block in blocks if self._pools[name].is_free(block)]
        return step

    def _active(self) -> int:
        return len(self._running) + len(self._loading)

    def _admit(self, request: Request, budget: int) -> int | None:
        """Start the request or its load; returns tokens used, None when it has to wait."""
        tokens = 0
        if self.connector is not None:
            answer = self.connector.match(request)
            if answer is None:
                return None
            tokens = answer
        layered = self.connector is not None and self.connector.layered
        first = tokens or min(budget, len(request.tokens))
        if tokens and layered:  # it advances in this step, and must not lose what is loaded into
            drafts = self.drafter.limit if self.drafter is not None else 0
            first = min(tokens + budget, len(request.tokens)) + drafts
        if not self._take_slots(request) or not self._grow(request, first, tokens):
            self._release(request)
            return None
        self._waiting.popleft()
        request.reused = tokens
        if self.connector is not None:
            self.connector.allocated(request, tokens)
        if tokens and layered:
            request.computed = tokens
        elif tokens:
            request.phase = Phase.LOADING
            request.state = request.states[0] if request.states else 0
            self._loading[request.request_id] = request
            return 0
        request.phase = Phase.RUNNING
        self._running.append(request)
        return self._advance(request, budget)

    def _advance(self, request: Request, budget: int) -> int:
        """Schedule the request's next tokens; returns how many."""
        left = len(request.tokens) - request.computed
        drafts: list[int] = []
        if left == 1 and self.drafter is not None:
            drafts = self._drafts(request, min(self.drafter.limit, budget - 1))
        count = min(left, budget)
        start, end = request.computed, request.computed + count + len(drafts)
        while not self._grow(request, end, start):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        confirmed = start + count
        span = Span(
            request.request_id,
            start,
            np.array(request.tokens[start:confirmed] + drafts, np.int64),
            {name: np.array(table, np.int64) for name, table in self._tables(request).items()},
            state=request.state,
            scratch=request.scratch,
            media=request.media,
            sample=1 + len(drafts) if confirmed == len(request.tokens) else 0,
        )
        request.drafts = drafts
        if self.stateful:
            span.writes = self._state_writes(request, count, len(drafts))
        self._spans[request.request_id] = span
        self._step.view.computed[request.request_id] = confirmed
        return count + len(drafts)

    def _drafts(self, request: Request, count: int) -> list[int]:
        """Guesses, cut so that no boundary lies at an unconfirmed token, and the end is not passed."""
        assert self.drafter is not None
        left = request.max_tokens - len(request.output) - 1
        count = min(count, left)
        if self.limits.boundary and self.stateful:
            after = (request.computed + 1) // self.limits.boundary + 1
            count = min(count, after * self.limits.boundary - request.computed - 2)
        return list(self.drafter.propose(request, count)) if count > 0 else []

    def _state_writes(self, request: Request, count: int, drafts: int) -> list[tuple[int, int]]:
        """Where this step's states go: one slot per position that may become the current one, the
        connector's wishes, and the last boundary."""
        start, end = request.computed, request.computed + count
        writes = [(count - 1 + i, request.states[i]) for i in range(drafts + 1)]
        if self.connector is not None:
            for position in self.connector.snapshot_positions(request, start, end):
                taken = self._slots.take(1)
                if taken is None:
                    self.skipped_snapshots += 1
                    continue
                writes.append((position - start - 1, taken[0]))
                self._step.view.snapshots.append(Snapshot(request.request_id, position, taken[0]))
        step = self.limits.boundary
        if step and self.connector is not None and end // step > start // step:
            position = end // step * step
            request.boundary = (position, request.states[-1])
            writes.append((position - start - 1, request.states[-1]))
        return writes

    # -- memory ------------------------------------------------------------------------------------------

    def _tables(self, request: Request) -> dict[str, list[int]]:
        """Tables by row name; sidecars use their source's."""
        tables = dict(request.tables)
        for row in self.model.rows:
            if row.kind == "indexer" and row.follows is not None:
                tables[row.name] = tables[row.follows]
        return tables

    def _take_slots(self, request: Request) -> bool:
        limit = self.drafter.limit if self.drafter is not None else 0
        states = 1 + limit + 1 if self.stateful else 0  # current, one a draft, boundary
        scratch = any(row.kind == "compressed" for row in self.model.rows)
        taken = self._slots.take(states + scratch)
        if taken is None:
            return False
        request.states, request.scratch = taken[:states], taken[states] if scratch else 0
        return True

    def _grow(self, request: Request, tokens: int, position: int) -> bool:
        """Pages for ``[0, tokens)`` as seen from ``position``; windowed groups only what is reached."""
        size = self.sizes.page_tokens
        wanted: dict[str, list[int]] = {}
        for name, window in self.groups.items():
            table = request.tables.setdefault(name, [])
            dead = 0 if window is None else max(0, position - window + 1) // size
            table += [0] * (min(dead, math.ceil(tokens / size)) - len(table))
            taken = self._pools[name].take(max(0, math.ceil(tokens / size) - len(table)))
            if taken is None:
                for other, blocks in wanted.items():
                    self._pools[other].give(blocks)
                return False
            wanted[name] = taken
        for name, blocks in wanted.items():
            request.tables[name] += blocks
        return True

    def _drop_windows(self, request: Request) -> None:
        """Null-map and free pages that no later token of the request can see."""
        for name, window in self.groups.items():
            if window is not None:
                dead = max(0, request.computed - window + 1) // self.sizes.page_tokens
                table = request.tables.setdefault(name, [])
                self._free(name, table[:dead], self._freed)
                table[:dead] = [0] * min(dead, len(table))

    def _free(self, name: str, blocks: Sequence[int], into: dict[str, list[int]]) -> None:
        into.setdefault(name, []).extend(self._pools[name].give(blocks))

    def _release(self, request: Request, into: dict[str, list[int]] | None = None) -> None:
        """Give back all memory of the request; ``into``: where its pages are listed as free."""
        for name, table in request.tables.items():
            self._free(name, table, self._freed if into is None else into)
        self._slots.give([*request.states, request.scratch])
        request.tables, request.states, request.scratch = {}, [], 0
        request.state, request.boundary, request.drafts = 0, (0, 0), []
        request.computed = 0

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._spans.pop(request.request_id, None)
        view = self._step.view
        view.computed.pop(request.request_id, None)
        dropped = [s for s in view.snapshots if s.request_id == request.request_id]
        view.snapshots = [s for s in view.snapshots if s.request_id != request.request_id]
        self._slots.give([s.slot for s in dropped])
        view.preempted.append(request.request_id)
        self._release(request, self._step.taken)
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(request)

    # -- what a step brought ---------------------------------------------------------------------------

    def update(self, answers: Answers, news: News) -> list[Request]:
        """Take in a step's tokens and the connector's news; returns requests that ended."""
        ended = []
        for request_id, span in self._spans.items():
            request = next((r for r in self._running if r.request_id == request_id), None)
            if request is None:
                continue  # aborted meanwhile
            if request_id in news.invalid:
                request.computed = request.reused = news.invalid[request_id]
                continue
            self._take_in(request, span, answers.get(request_id, ()))
            if request.done:
                self._end(request, Phase.FINISHED)
                ended.append(request)
        for request_id, tokens in news.loaded.items():
            loading = self._loading.pop(request_id, None)
            if loading is not None:
                self._load_ended(loading, tokens)
        self._slots.give(news.slots)
        for request_id in news.sent:
            self._release(self._held.pop(request_id))
        return ended

    def _take_in(self, request: Request, span: Span, answers: Sequence[tuple[int, str]]) -> None:
        drafts = request.drafts
        if not answers:
            request.computed = span.end
            request.state = request.states[0] if request.states else 0
            return
        right = 0
        while right < len(drafts) and drafts[right] == answers[right][0]:
            right += 1
        self.accepted_drafts += right
        self.rejected_drafts += len(drafts) - right
        for token, digest in answers[: right + 1]:
            request.tokens.append(token)
            request.digests.append(digest)
        request.computed = span.end - len(drafts) + right
        if request.states:
            request.state = request.states[right]

    def _load_ended(self, request: Request, tokens: int) -> None:
        if request.phase is Phase.ABORTED:
            self._release(request)
            return
        request.reused = tokens
        if tokens == 0:  # the load failed: the request starts over, perhaps with another one
            self._release(request)
            request.phase = Phase.WAITING
            self._waiting.appendleft(request)
            return
        request.phase = Phase.RUNNING
        request.computed = tokens
        self._running.append(request)

    def _end(self, request: Request, phase: Phase) -> None:
        if request.phase is Phase.LOADING:
            request.phase = phase  # the load still writes its memory
            if self.connector is not None:
                self.connector.finished(request)
            return
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._running:
            self._running.remove(request)
        request.phase = phase
        if self.connector is not None and self.connector.finished(request):
            self._held[request.request_id] = request
            return
        self._release(request)
