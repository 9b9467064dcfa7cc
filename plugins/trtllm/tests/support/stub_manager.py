"""What stands between the stub's executor and a connector: deltas, broadcast, requests under way.

Follows the engine's own manager: which calls, with which arguments, in which order; and asserts what the
engine relies on. Every message is pickled, as between processes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import stub_interface

STREAM = None


@dataclass
class StubRequest:
    """What a connector may read of the engine's request, and what the stub needs beside it."""

    request_id: int
    prompt: list[int]
    max_new: int = 4
    cache_salt: str | None = None
    lora_task_id: int | None = None
    py_lora_path: str | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_positions: list[int] | None = None
    multimodal_lengths: list[int] | None = None
    return_context_logits: bool = False
    is_generation_only_request: bool = False
    is_dummy_request: bool = False
    state: str = "waiting"
    tokens: list[int] = field(default_factory=list)
    context_current_position: int = 0
    pages: list[list[int]] = field(default_factory=list)
    chunk: int = 0
    drafts: list[int] = field(default_factory=list)
    generated: int = 0
    cancelled: bool = False
    matched: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class StubManager:
    """``on_rank(rank, call)`` runs on the rank's own thread. ``grouped``: the cache reports by layer group.
    ``owners``: attention is data parallel, and this is one owner's manager of one rank."""

    def __init__(
        self,
        home: ModuleType,
        scheduler: Any,
        workers: list[Any],
        threads: list[ThreadPoolExecutor],
        *,
        grouped: bool,
        owner: int | None = None,
    ) -> None:
        self.home = home
        self.scheduler = scheduler
        self.workers = workers
        self.threads = threads
        self.grouped = grouped
        self.owner = owner
        self.told: dict[int, tuple[list[list[int]], list[int]]] = {}
        self.external: dict[int, int] = {}
        self.new_loading: dict[int, StubRequest] = {}
        self.new_saving: dict[int, StubRequest] = {}
        self.loading: dict[int, StubRequest] = {}
        self.saving: dict[int, StubRequest] = {}
        self.local: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in workers]
        self.output: Any = None

    def all_ranks(self, call: Callable[[Any], Any]) -> list[Any]:
        """The same call on every rank at once."""
        pairs = zip(self.threads, self.workers, strict=True)
        return [f.result(60) for f in [thread.submit(call, worker) for thread, worker in pairs]]

    # -- the query and the allocation ------------------------------------------------------------------

    def query(self, request: StubRequest, computed: int) -> tuple[int, bool]:
        tokens, waits = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert isinstance(tokens, int) and isinstance(waits, bool), (tokens, waits)
        assert not (tokens == 0 and waits), "load_kv_async must be False when num_tokens is 0"
        assert tokens >= 0 and computed + tokens < len(request.tokens), "a token must be left"
        request.matched.append((computed, tokens))
        return tokens, waits

    def commit(self, request: StubRequest, tokens: int, waits: bool) -> None:
        if waits:
            self.new_loading[request.request_id] = request
        self.external[request.request_id] = tokens

    def allocated(self, request: StubRequest) -> None:
        lists = [list(one) for one in request.pages]
        if self.grouped:
            self.scheduler.update_state_after_alloc_by_layer_group(request, lists)
        else:
            self.scheduler.update_state_after_alloc(request, lists[0])

    # -- a step ----------------------------------------------------------------------------------------

    def build(self, context: list[StubRequest], generation: list[StubRequest]) -> None:
        output = self._output()
        for request in context:
            if request.request_id in self.new_loading:
                continue
            new = request.request_id not in self.told
            position = request.context_current_position
            position -= self.external.get(request.request_id, 0)
            data = self._data(request, position, request.chunk)
            (output.new_requests if new else output.cached_requests).append(data)
        for request in generation:
            scheduled = 1 + len(request.drafts)
            output.cached_requests.append(self._data(request, len(request.tokens) - 1, scheduled))
        self.external = {}
        self.output = output

    def _output(self) -> Any:
        output = self.home.SchedulerOutput()
        if self.owner is not None:
            output.attention_dp_rank = self.owner
        return output

    def _data(self, request: StubRequest, position: int, scheduled: int) -> Any:
        """Only what was appended since the last call: nobody hears of lists that shrank."""
        pages, tokens = self.told.setdefault(request.request_id, ([], []))
        while len(pages) < len(request.pages):
            pages.append([])
        fresh = [one[len(seen) :] for one, seen in zip(request.pages, pages, strict=True)]
        for seen, more in zip(pages, fresh, strict=True):
            seen.extend(more)
        new_tokens = request.tokens[len(tokens) :]
        tokens.extend(new_tokens)
        flat = fresh[0] if len(fresh) == 1 else []
        data = self.home.RequestData(request.request_id, new_tokens, flat, position, scheduled)
        if self.grouped:
            data.new_block_ids_by_layer_group = fresh
            data.cache_salt = request.cache_salt
        return data

    def reset(self, request_id: int) -> None:
        """An allocation died: a replay is reported as a new request."""
        self.told.pop(request_id, None)
        self.external.pop(request_id, None)

    def park(self, context: list[StubRequest]) -> list[StubRequest]:
        """Requests that load in the background leave the batch."""
        kept = []
        for request in context:
            if request.request_id in self.new_loading:
                request.state = "loading"
            else:
                kept.append(request)
        return kept

    def hand_over(self) -> None:
        """Metadata to every rank, then the start of loads."""
        if self.output is None:
            return
        made = self.scheduler.build_connector_meta(self.output)
        self.output = None
        wire = pickle.dumps(made)

        def start(worker: Any) -> None:
            worker.bind_connector_meta(pickle.loads(wire))
            worker.start_load_kv(STREAM)

        self.all_ranks(start)

    def layers(self, count: int, compute: Callable[[int], None]) -> None:
        for layer in range(count):
            self.all_ranks(lambda worker, at=layer: worker.wait_for_layer_load(at, STREAM))
            compute(layer)
            self.all_ranks(lambda worker, at=layer: worker.save_kv_layer(at, STREAM))
        self.all_ranks(lambda worker: worker.wait_for_save(STREAM))

    # -- the end ---------------------------------------------------------------------------------------

    def finished(self, request: StubRequest) -> bool:
        lists = [list(one) for one in request.pages]
        if self.grouped and lists:
            saving = self.scheduler.request_finished_by_layer_group(request, lists)
        else:
            saving = self.scheduler.request_finished(request, lists[0] if lists else [])
        assert isinstance(saving, bool)
        if saving:
            self.new_saving[request.request_id] = request
        return saving

    def moving(self, request_id: int) -> bool:
        """The engine keeps the request's pages until transfers are over."""
        maps = (self.new_loading, self.new_saving, self.loading, self.saving)
        return any(request_id in one for one in maps)

    def get_finished(self) -> tuple[list[StubRequest], list[StubRequest]]:
        """(requests whose saves all ranks have ended, requests whose loads all ranks have ended)."""
        ended, started = list(self.new_saving), list(self.new_loading)
        self.saving.update(self.new_saving)
        self.loading.update(self.new_loading)
        self.new_saving, self.new_loading = {}, {}
        found = self.all_ranks(lambda worker: worker.get_finished(list(ended), list(started)))
        for rank, (saved, loaded) in enumerate(found):
            for ids, told, handed in (
                (saved, self.local[rank][0], self.saving),
                (loaded, self.local[rank][1], self.loading),
            ):
                assert len(set(ids)) == len(ids), f"rank {rank} tells an id twice: {ids}"
                for request_id in ids:
                    assert request_id in handed, f"rank {rank} tells {request_id}, never handed in"
                    assert request_id not in told, f"rank {rank} tells {request_id} again"
                    told.add(request_id)
        saved = set.intersection(*(one for one, _ in self.local))
        loaded = set.intersection(*(two for _, two in self.local))
        for one, two in self.local:
            one -= saved
            two -= loaded
        return (
            [self.saving.pop(request_id) for request_id in sorted(saved)],
            [self.loading.pop(request_id) for request_id in sorted(loaded)],
        )


def rank_thread(rank: int) -> ThreadPoolExecutor:
    """A thread that is a rank."""
    return ThreadPoolExecutor(1, f"rank-{rank}", stub_interface.set_rank, (rank,))
