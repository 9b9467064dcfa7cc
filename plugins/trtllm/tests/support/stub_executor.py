"""An executor loop without an engine: allocates, calls a connector in the real order, checks every byte.

One step is: schedule; prepare (local match, query under the tree's lock, allocation, callback); output;
metadata and loads; layers; saves; sampling and rewind; ends of requests; what has ended.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from stub_blocks import Blocks
from stub_interface import set_rank
from stub_manager import StubManager, StubRequest, rank_thread
from stub_memory import RankMemory, Shape, next_token, prefix_state


class StubExecutor:
    """``module``: holds the two connector classes. ``v2``: memory in layer groups, allocated chunk by chunk.
    ``owner``: one rank of attention data parallelism. ``short``: how much of an offer is taken (V2)."""

    def __init__(
        self,
        module: ModuleType,
        home: ModuleType,
        llm_args: Any,
        shape: Shape,
        *,
        names: tuple[str, str] = ("UCMScheduler", "UCMWorker"),
        v2: bool = False,
        ranks: int = 1,
        owner: int | None = None,
        chunk: int = 64,
        drafts: Callable[[], int] = lambda: 0,
        partial: bool = False,
        local_reuse: bool = True,
        short: Callable[[int], int] = lambda offer: offer,
        batch: int = 4,
    ) -> None:
        self.shape, self.v2, self.chunk, self.drafts = shape, v2, chunk, drafts
        self.partial, self.short, self.batch = partial, short, batch
        self.local_reuse = local_reuse and not v2
        heads = 1 if shape.latent else shape.heads
        width = max(1, heads // ranks)
        self.memories = []
        for rank in range(ranks):
            first = 0 if shape.latent else rank * heads // ranks
            self.memories.append(RankMemory(shape, range(first, first + width)))
        self.blocks = [
            Blocks(number, shape.pages, self.memories) for number in range(len(shape.layer_groups))
        ]
        numbers = [owner] if owner is not None else list(range(ranks))
        self.threads = [rank_thread(rank) for rank in numbers]
        scheduler, workers = self._construct(module, llm_args, names, numbers)
        self.manager = StubManager(home, scheduler, workers, self.threads, grouped=v2, owner=owner)
        for worker, memory, thread in zip(workers, self.memories, self.threads, strict=True):
            thread.submit(_register, worker, memory, v2).result(60)
        if hasattr(scheduler, "wait_for_initialization"):
            scheduler.wait_for_initialization()
        self.requests: dict[int, StubRequest] = {}
        self.waiting: list[StubRequest] = []
        self.active: list[StubRequest] = []
        self.held: dict[int, str] = {}
        #: Longest a query held the tree's lock, seconds.
        self.longest_query_s = 0.0
        self.external_tokens = 0
        self.tree_lock = threading.Lock()
        self.checked = 0
        self.closed = False

    def _construct(
        self, module: ModuleType, llm_args: Any, names: tuple[str, str], numbers: list[int]
    ) -> tuple[Any, list[Any]]:
        """Scheduler and worker at the same time, as the engine does on the rank that schedules."""
        scheduler_class, worker_class = (getattr(module, name) for name in names)
        first = numbers[0]
        with ThreadPoolExecutor(2, "construct", set_rank, (first,)) as pool:
            worker = pool.submit(worker_class, llm_args)
            scheduler = pool.submit(scheduler_class, llm_args)
            made = [worker.result(60)]
            side = scheduler.result(60)
        for thread in self.threads[1:]:
            made.append(thread.submit(worker_class, llm_args).result(60))
        return side, made

    # -- what a test does --------------------------------------------------------------------------------

    def add(self, request: StubRequest) -> StubRequest:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return request

    def run(self, *requests: StubRequest, steps: int = 2000) -> None:
        """Until all are done."""
        for request in requests:
            self.add(request)
        for _ in range(steps):
            if not self.waiting and not self.active and not self.held:
                return
            self.step()
            if not any(r.state in ("context", "generation", "waiting") for r in self._alive()):
                time.sleep(0.001)  # everything waits for transfers
        raise AssertionError(f"not done after {steps} steps: {[r.state for r in self._alive()]}")

    def _alive(self) -> list[StubRequest]:
        return [*self.waiting, *self.active]

    def cancel(self, request: StubRequest) -> None:
        request.cancelled = True

    def preempt(self, request: StubRequest, *, reset: bool) -> None:
        """Take the request's pages; it starts over with all its tokens. ``reset``: the engine frees them
        before it tells, else it asks first."""
        if request not in self.active or request.state not in ("context", "generation"):
            return
        if self.manager.moving(request.request_id):
            return
        self.active.remove(request)
        if reset:
            self.manager.scheduler.request_reset(request)
            self._free(request, told=False)
        elif self.manager.finished(request):
            self.held[request.request_id] = "replay"
            request.state = "saving"
            self.manager.reset(request.request_id)
            return
        else:
            self._free(request)
        self._replay(request)

    def _replay(self, request: StubRequest) -> None:
        self.manager.reset(request.request_id)
        request.prompt = list(request.tokens)
        request.state, request.context_current_position, request.pages = "waiting", 0, []
        self.waiting.append(request)

    # -- one step ----------------------------------------------------------------------------------------

    def step(self) -> None:
        self._cancellations()
        context, generation = self._schedule()
        manager = self.manager
        manager.build(context, generation)
        context = manager.park(context)
        manager.hand_over()
        if context or generation:
            self._forward(context, generation)
        self._sample(context, generation)
        self._ends()
        saved, loaded = manager.get_finished()
        for request in loaded:
            if request.state == "loading":
                request.state = "context"
        for request in saved:
            self._let_go(request)

    def _let_go(self, request: StubRequest) -> None:
        what = self.held.pop(request.request_id)
        self._free(request)
        if what == "replay":
            self._replay(request)
        else:
            request.state = "done"

    def _cancellations(self) -> None:
        for request in [r for r in self._alive() if r.cancelled]:
            if request.state == "loading" and self.v2:
                continue  # later releases keep it until the load is over
            for where in (self.waiting, self.active):
                if request in where:
                    where.remove(request)
            self._terminate(request)

    def _terminate(self, request: StubRequest) -> None:
        if self.manager.finished(request):
            self.held[request.request_id] = "end"
            request.state = "saving"
        else:
            self._free(request)
            request.state = "done"
            self.manager.told.pop(request.request_id, None)

    def _schedule(self) -> tuple[list[StubRequest], list[StubRequest]]:
        context, generation = [], []
        for request in list(self.active):
            if request.state == "generation" and self._grow(request):
                generation.append(request)
            elif request.state == "context":
                request.chunk = min(
                    self.chunk, len(request.prompt) - request.context_current_position
                )
                if not self.v2 or self._cover(
                    request, request.context_current_position + request.chunk
                ):
                    context.append(request)
        while self.waiting and len(self.active) < self.batch:
            if not self._start(self.waiting[0]):
                break
            request = self.waiting.pop(0)
            self.active.append(request)
            context.append(request)
        return context, generation

    # -- allocation --------------------------------------------------------------------------------------

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.shape.page_tokens)

    def _start(self, request: StubRequest) -> bool:
        """Local match, query under the lock, pages, callback."""
        worst = self._pages_for(len(request.prompt) + request.max_new + 8)
        if any(blocks.available < worst for blocks in self.blocks):
            return False
        with self.tree_lock:
            local = self._match(request)
            started = time.monotonic()
            offer, waits = self.manager.query(request, local)
            self.longest_query_s = max(self.longest_query_s, time.monotonic() - started)
        taken = self.short(offer) if self.v2 and offer else offer
        request.context_current_position = local + taken
        if self.v2:
            first = min(self.chunk, len(request.prompt) - local - taken)
            self._cover(
                request, local + taken + (first if taken == offer else 0), begin=local + taken
            )
        else:
            blocks = self.blocks[0]
            while len(request.pages[0]) < self._pages_for(len(request.prompt)):
                request.pages[0].append(blocks.take())
            self._copy_partial(request, local)
        self.manager.commit(request, taken, waits)
        self.external_tokens += taken
        self.manager.allocated(request)
        request.state = "context"
        request.chunk = min(self.chunk, len(request.prompt) - request.context_current_position)
        if self.v2:
            self._cover(request, request.context_current_position + request.chunk)
        return True

    def _match(self, request: StubRequest) -> int:
        """Full blocks of the tree, and perhaps a part of one more."""
        request.pages = [[] for _ in self.blocks]
        if not self.local_reuse:
            return 0
        size, states = self.shape.page_tokens, self._states(request, request.prompt)
        most = (len(request.prompt) - 1) // size
        for at in range(most):
            page = self.blocks[0].reuse((at, states[(at + 1) * size - 1]))
            if page is None:
                break
            request.pages[0].append(page)
        matched = len(request.pages[0]) * size
        if self.partial and matched and matched + size // 2 < len(request.prompt):
            matched += size // 2
        return matched

    def _copy_partial(self, request: StubRequest, local: int) -> None:
        rest = local % self.shape.page_tokens
        if rest:
            states = self._states(request, request.prompt)[local - rest : local]
            for memory in self.memories:
                memory.write(0, request.pages[0][local // self.shape.page_tokens], 0, states)

    def _cover(self, request: StubRequest, tokens: int, begin: int | None = None) -> bool:
        """Pages of every layer group for the first ``tokens``, without what a window has passed."""
        position = request.context_current_position if begin is None else begin
        for blocks, pages in zip(self.blocks, request.pages, strict=True):
            window = self.shape.layer_groups[blocks.group][0]
            first = 0 if window is None else max(0, position - window) // self.shape.page_tokens
            while len(pages) < self._pages_for(tokens):
                if len(pages) < first:
                    pages.append(-1)
                elif blocks.available:
                    pages.append(blocks.take())
                else:
                    return False
        return True

    def _grow(self, request: StubRequest) -> bool:
        request.drafts = []
        states = self._states(request, request.tokens)
        for at in range(self.drafts()):
            right = next_token(states[-1])
            draft = right if (request.request_id + len(request.tokens) + at) % 3 else right + 1
            request.drafts.append(draft)
            states = self._states(request, request.tokens + request.drafts)
        return self._cover(
            request, len(request.tokens) + len(request.drafts), begin=len(request.tokens)
        )

    def _free(self, request: StubRequest, *, told: bool = True) -> None:
        if self.local_reuse and request.pages:
            states = self._states(request, request.tokens)
            size = self.shape.page_tokens
            whole = min(request.context_current_position, len(request.tokens) - 1) // size
            if request.state in ("generation", "saving", "context"):
                for at in range(min(whole, len(request.pages[0]))):
                    self.blocks[0].keep((at, states[(at + 1) * size - 1]), request.pages[0][at])
        for blocks, pages in zip(self.blocks, request.pages, strict=False):
            for page in pages:
                if page >= 0:
                    blocks.drop(page, told=told)
        request.pages = []

    # -- compute -----------------------------------------------------------------------------------------

    def _states(self, request: StubRequest, tokens: list[int]) -> list[int]:
        return prefix_state(tokens, request.cache_salt or "")

    def _forward(self, context: list[StubRequest], generation: list[StubRequest]) -> None:
        for request in (*context, *generation):
            self._check(request)

        def compute(layer: int) -> None:
            if layer == 0:  # all layers of a token are written at once
                for request in context:
                    begin = request.context_current_position
                    self._write(request, request.prompt, begin, begin + request.chunk)
                for request in generation:
                    tokens = request.tokens + request.drafts
                    self._write(request, tokens, len(request.tokens) - 1, len(tokens))

        self.manager.layers(self.shape.layers, compute)

    def _write(self, request: StubRequest, tokens: list[int], begin: int, end: int) -> None:
        states = self._states(request, tokens)
        for page_at, slot, first, last in _spans(begin, end, self.shape.page_tokens):
            for blocks, pages in zip(self.blocks, request.pages, strict=True):
                if pages[page_at] >= 0:
                    for memory in self.memories:
                        memory.write(blocks.group, pages[page_at], slot, states[first:last])

    def _check(self, request: StubRequest) -> None:
        """Everything the step reads of the request must be what its tokens say."""
        computed = (
            request.context_current_position
            if request.state == "context"
            else len(request.tokens) - 1
        )
        states = self._states(request, request.tokens)
        for blocks, pages in zip(self.blocks, request.pages, strict=True):
            window = self.shape.layer_groups[blocks.group][0]
            first_token = 0 if window is None else max(0, computed - window)
            for page_at, slot, first, last in _spans(first_token, computed, self.shape.page_tokens):
                page = pages[page_at]
                assert page >= 0, f"request {request.request_id}: no page for tokens from {first}"
                for rank, memory in enumerate(self.memories):
                    self.checked += last - first
                    assert not memory.wrong(blocks.group, page, slot, states[first:last]), (
                        f"request {request.request_id}, rank {rank}, group {blocks.group}: wrong bytes at "
                        f"tokens {first}..{last} ({request.state}, matched {request.matched})"
                    )

    def _sample(self, context: list[StubRequest], generation: list[StubRequest]) -> None:
        for request in context:
            request.context_current_position += request.chunk
            if request.context_current_position == len(request.prompt):
                request.state = "generation"
                self._emit(request, [])
        for request in generation:
            accepted: list[int] = []
            for draft in request.drafts:
                states = self._states(request, request.tokens + accepted)
                if draft != next_token(states[-1]):
                    break
                accepted.append(draft)
            self._emit(request, accepted)
            request.context_current_position = len(request.tokens) - 1
        for request in (*context, *generation):
            self._pass_windows(request)

    def _emit(self, request: StubRequest, accepted: list[int]) -> None:
        """Accepted drafts, one token more, and a rewind of the pages that drafts needed."""
        request.tokens += accepted
        states = self._states(request, request.tokens)
        request.tokens.append(next_token(states[-1]))
        request.generated += 1 + len(accepted)
        for blocks, pages in zip(self.blocks, request.pages, strict=True):
            while len(pages) > self._pages_for(max(len(request.tokens) - 1, len(request.prompt))):
                page = pages.pop()
                if page >= 0:
                    blocks.drop(page)

    def _pass_windows(self, request: StubRequest) -> None:
        """A window's pages are given away as soon as it has passed them."""
        position = len(request.tokens) - 1
        if request.state == "context":
            position = request.context_current_position
        for blocks, pages in zip(self.blocks, request.pages, strict=True):
            window = self.shape.layer_groups[blocks.group][0]
            if window is None:
                continue
            for at in range(min(max(0, position - window) // self.shape.page_tokens, len(pages))):
                if pages[at] >= 0:
                    blocks.drop(pages[at])
                    pages[at] = -1

    def _ends(self) -> None:
        for request in list(self.active):
            if request.state == "generation" and request.generated >= request.max_new:
                self.active.remove(request)
                self._terminate(request)

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Idempotent."""
        if self.closed:
            return
        self.closed = True
        for thread, worker in zip(self.threads, self.manager.workers, strict=True):
            if hasattr(worker, "shutdown"):
                thread.submit(worker.shutdown).result(60)
        if hasattr(self.manager.scheduler, "shutdown"):
            self.manager.scheduler.shutdown()
        for thread in self.threads:
            thread.shutdown()


def _register(worker: Any, memory: RankMemory, v2: bool) -> None:
    if v2:
        worker.register_kv_cache_layout(memory.layout())
    else:
        worker.register_kv_caches(memory.tensor())


def _spans(begin: int, end: int, size: int) -> list[tuple[int, int, int, int]]:
    """(page, first slot, first token, last token) of the pages that hold tokens ``[begin, end)``."""
    found = []
    for page in range(begin // size, math.ceil(end / size)):
        first, last = max(begin, page * size), min(end, (page + 1) * size)
        if first < last:
            found.append((page, first - page * size, first, last))
    return found
