"""The two classes that TensorRT-LLM is told: its interface on one page, every call goes to one of the two
sides. Works with both generations: one pool tensor, or layer groups with regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ucm_trtllm.arena import Arena
from ucm_trtllm.deployment import Deployment, forget, meet
from ucm_trtllm.homes import interface
from ucm_trtllm.lanes import lanes_of
from ucm_trtllm.messages import ArenaName, Metadata
from ucm_trtllm.pools import Pool, pool_of_layout, pool_of_tensor
from ucm_trtllm.scheduler import SchedulerSide
from ucm_trtllm.worker import WorkerSide, cuda_mark, nothing_queued

_interface: Any = interface()


def _rank() -> int:
    import tensorrt_llm

    return int(tensorrt_llm.mpi_rank())


def _device() -> tuple[str, int]:
    """Where regions of bare addresses lie."""
    try:
        import torch
    except ModuleNotFoundError:
        return "cpu", 0
    if not torch.cuda.is_available():
        return "cpu", 0
    return "cuda", int(torch.cuda.current_device())


class UCMScheduler(_interface.KvCacheConnectorScheduler):
    """Scheduler side. Methods are called from the executor's thread, the match query under the lock of the
    engine's block tree."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._deployment = meet(llm_args, _rank(), "scheduler")
        self._side: SchedulerSide | None = None

    def _ready(self) -> SchedulerSide | None:
        """The side, once the worker of this process has registered its memory."""
        if self._side is None and self._deployment.placement is not None:
            self._side = _scheduler_side(self._deployment)
        return self._side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        side = self._ready()
        return (0, False) if side is None else side.match(request, int(num_computed_tokens))

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: Sequence[Sequence[int]]
    ) -> None:
        if self._side is not None:
            self._side.allocated(request, block_ids_by_layer_group)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        side = self._ready()
        return Metadata() if side is None else side.build(scheduler_output)

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        del cache_block_ids
        return self._side is not None and self._side.finished(request)

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: Sequence[Sequence[int]]
    ) -> bool:
        del cache_block_ids_by_layer_group
        return self._side is not None and self._side.finished(request)

    def request_reset(self, request: Any) -> None:
        """Releases later than 1.3: the request's pages are gone, and it will start over."""
        if self._side is not None:
            self._side.reset(request)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Releases later than 1.3: prompt tokens ``[start, end)`` of a promise will not be taken."""
        if self._side is not None:
            self._side.cancelled(request, start, end)

    def wait_for_initialization(self) -> None:
        """Nothing to wait for: without registered memory every answer is a miss."""

    def shutdown(self) -> None:
        """Close what this process opened; the engine itself has no call for it."""
        forget([self._deployment])


class UCMWorker(_interface.KvCacheConnectorWorker):
    """Worker side of one rank. Methods are called from the executor's thread."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._deployment = meet(llm_args, _rank(), "worker")
        self._side: WorkerSide | None = None
        self._computed: object | None = None

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        self._register(pool_of_tensor(kv_cache_tensor))

    def register_kv_cache_layout(self, layout: Any) -> None:
        self._register(pool_of_layout(layout, _device()))

    def _register(self, pool: Pool) -> None:
        self._deployment.register(pool)
        self._side = _worker_side(self._deployment)

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """Nothing to run at the end of a forward pass: its stream is marked in ``wait_for_save``."""
        return None

    def _message(self) -> Metadata | None:
        found = self._metadata
        return found if isinstance(found, Metadata) else None

    def start_load_kv(self, stream: Any) -> None:
        meta = self._message()
        if meta is not None and self._side is not None:
            self._side.start(meta, stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Loads of this step are complete when ``start_load_kv`` returns: a layer that computes without
        this call (a captured graph) could not be told from one that waited."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Saves are issued when the step has computed."""

    def wait_for_save(self, stream: Any) -> None:
        meta = self._message()
        if meta is not None and meta is not self._computed and self._side is not None:
            self._computed = meta  # a step is saved once, however often the engine asks
            self._side.finish(meta, stream)

    def get_finished(
        self, finished_gen_req_ids: Sequence[int], started_loading_req_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        if self._side is None:
            return list(finished_gen_req_ids), []
        return self._side.finished(finished_gen_req_ids, started_loading_req_ids)

    def shutdown(self) -> None:
        """Stop this rank and close what its process opened; the engine itself has no call for it."""
        if self._side is not None:
            self._side.close()
        forget([self._deployment])


def _scheduler_side(deployment: Deployment) -> SchedulerSide:
    core = deployment.config.core
    assert deployment.placement and deployment.stager and deployment.arena and deployment.pool
    return SchedulerSide(
        deployment.placement,
        deployment.stager,
        deployment.arena,
        whole_prompts=deployment.pool.whole_prompts,
        loads=core.promise_loads,
        takes_hits=deployment.facts.block_reuse,
        threshold=core.persist_token_threshold,
        lite=core.use_lite,
    )


def _worker_side(deployment: Deployment) -> WorkerSide:
    assert deployment.pool is not None

    def attach(name: ArenaName) -> Arena:
        own = deployment.arena
        return own if own is not None and own.name == name else Arena.attach(name)

    kind, index = deployment.pool.device
    side = WorkerSide(
        lanes_of(deployment),
        deployment.device,
        rank=deployment.facts.tp_rank,
        attach=attach,
        limit_s=deployment.config.store.timeout_ms / 1000,
        mark=nothing_queued if kind == "cpu" else cuda_mark(index),
        event_sync=deployment.config.core.enable_event_sync,
    )
    if deployment.arena is not None:
        side.start(Metadata(arena=deployment.arena.name), None)
    return side
