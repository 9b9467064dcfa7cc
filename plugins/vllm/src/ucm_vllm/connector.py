"""``UCMConnector``: vLLM's connector interface on one page, every call handed to one of two sides.

One class for every model; modes come from configuration. The instance vLLM builds in the scheduler
process has a :class:`SchedulerSide`, the one in each worker a :class:`WorkerSide`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ucm_core.config.load import load_config
from ucm_core.errors import UnsupportedError
from ucm_vllm.messages import UcmMetadata
from ucm_vllm.modes import choose_modes
from ucm_vllm.startup import open_deployment
from ucm_vllm.stats import UcmPromMetrics, UcmStats
from ucm_vllm.versions import SUPPORTED

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ucm_vllm.deployment import Deployment
    from ucm_vllm.scheduler import SchedulerSide
    from ucm_vllm.worker import WorkerSide


class UCMConnector(KVConnectorBase_V1, SupportsHMA):
    """KV that outlives the process. See ``docs/operator-vllm.md`` for options and failure behaviour."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        if kv_cache_config is None:
            raise UnsupportedError(
                "UCMConnector was built without kv_cache_config, as vLLM before 0.11 did; "
                f"supported vLLM: {SUPPORTED}"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._deployment = self._open(vllm_config, kv_cache_config, role)
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = self._deployment.scheduler_side()
        except BaseException:
            self._deployment.close()
            raise

    @classmethod
    def _open(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: KVConnectorRole
    ) -> Deployment:
        return open_deployment(vllm_config, kv_cache_config, role.name.lower())

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True when loads hang on the calls of layers: a graph replayed whole would skip them.

        Where CUDA graphs exist vLLM asks while it reads its arguments, before any process starts: a
        wrong configuration is refused there, with its reason as the last words.
        """
        config = load_config(extra_config)
        return choose_modes(config.core.use_layerwise).layered_loads

    # -- both sides --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what was copied, fence the rest, join threads. Bounded; safe to call twice."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
        self._deployment.close()

    def get_kv_connector_stats(self) -> UcmStats | None:
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return self._worker.stats.take() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> UcmStats:
        return UcmStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> UcmPromMetrics:
        return UcmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def pending(self) -> dict[str, int]:
        """Sizes of every map of this side, for tests and diagnosis: zeros when nothing is under way."""
        side = self._scheduler if self._scheduler is not None else self._worker
        return side.pending() if side is not None else {}

    # -- scheduler ---------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped save is a later miss, so preempted requests need not be recomputed."""
        return False

    @property
    def _sched(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler call reached a worker's connector"
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        self._sched.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._sched.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._sched.allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        assert state is not None, f"vLLM gave no block state; supported vLLM: {SUPPORTED}"
        return self._sched.build(
            scheduler_output, state.get_block_ids, state.boundary_state_offloads
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        spoiled = self._sched.update(connector_output)
        if spoiled and self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks(spoiled)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.finished(request, (block_ids,)), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.finished(request, block_ids), None

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        # Which tier will serve is known only when the load has run; only a one-tier pipeline is sure.
        sure = self._deployment.settings.tiers == ("Posix",)
        source = CacheHitSource.DISK if sure else CacheHitSource.EXTERNAL_UNSPECIFIED
        return {source: num_external_tokens} if num_external_tokens else {}

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self._sched.events
        return events.take() if events is not None else ()

    def has_pending_push_work(self) -> bool:
        """Blocks that are held back need one more step to be released, also when nothing else does."""
        return self._scheduler is not None and self._scheduler.wants_steps()

    def reset_cache(self) -> bool:
        """What is stored stays, but this process does not use it any more: see SchedulerSide.reset."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # -- worker --------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.close()
        pp_rank, tp_rank = self._ranks()
        self._worker = self._deployment.worker_side(kv_caches, pp_rank, tp_rank)

    def unregister_kv_caches(self) -> None:
        """0.33, before the memory of the KV cache goes (sleep mode): nothing of ours touches it any more.

        vLLM has drained transfers by then. Else they end here, and are told as failed when it collects.
        """
        if self._worker is not None:
            self._worker.fence()

    def restore_kv_caches(self) -> None:
        """0.33, after it is back at the same addresses: nothing to do."""

    def _ranks(self) -> tuple[int, int]:
        """(pipeline stage, tensor-parallel rank) of this worker."""
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        return get_pp_group().rank_in_group, get_tensor_model_parallel_rank()

    @property
    def _work(self) -> WorkerSide:
        assert self._worker is not None, "register_kv_caches must come before any transfer"
        return self._worker

    @property
    def _meta(self) -> UcmMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, UcmMetadata)
        return meta

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, UcmMetadata)
        self._work.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._work.start_loads(self._meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Where loads are layerwise: until the layer's bytes are in place and verified, or bad."""
        self._work.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Where saves are layerwise: start copying; :meth:`wait_for_save` takes what was not called for."""
        self._work.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._work.start_saves(self._meta)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received, failed = self._work.poll(self._meta)
        if failed:  # a later call cannot say it, and vLLM would compute on what did not arrive
            raise UnsupportedError(
                f"this vLLM does not ask for failed loads of models with windows or several groups; "
                f"supported vLLM: {SUPPORTED}"
            )
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._work.poll(self._meta)
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._work.take_failed_pages()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._work.take_metadata()
