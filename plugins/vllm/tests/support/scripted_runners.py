"""Who calls the worker's connector, and in which order: one class per model runner and release.

``v1``     model runner V1 of 0.32 (loads may start before the forward pass or after it)
``v2``     vLLM's own driver of model runner V2, as installed
``0.33``   what 0.33 changed for a connector: results are collected before `wait_for_save` when the end
           of a step is put off, and an asynchronous load is ordered (`update_state_after_alloc`) only
           when the steps in flight at its admission are over
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from scripted_engine import ScriptedEngine
    from scripted_world import ScriptedConnector

Caches = dict[str, torch.Tensor]
Model = Callable[[], None]


class RunnerV1:
    """0.32: the calls of the worker's mixin around a model's forward pass."""

    def __init__(self, engine: ScriptedEngine, worker: ScriptedConnector, caches: Caches) -> None:
        self.engine = engine
        self.worker = worker
        self.register(caches)

    def register(self, caches: Caches) -> None:
        self.worker.register_kv_caches(caches)

    def scheduling(self) -> None:
        """Before each `schedule`."""

    def aborting(self, name: str) -> None:
        """Before a request is aborted."""

    def run(self, output: SchedulerOutput, model: Model) -> KVConnectorOutput:
        """One step; ``model`` computes it."""
        worker, meta = self.worker, output.kv_connector_metadata
        assert meta is not None
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        self.compute(output, model)
        worker.wait_for_save()
        report = self.collect(output)
        worker.clear_connector_metadata()
        return report

    def compute(self, output: SchedulerOutput, model: Model) -> None:
        """The forward pass; loads that it needs start before it, others after it."""
        if output.has_sync_kv_loads:
            self.worker.start_load_kv(None)  # type: ignore[arg-type]
        model()
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(None)  # type: ignore[arg-type]

    def collect(self, output: SchedulerOutput) -> KVConnectorOutput:
        worker = self.worker
        results = worker.get_transfer_results(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )


class RunnerV2(RunnerV1):
    """vLLM's `ActiveKVConnector`, which its model runner V2 drives; only the model is scripted."""

    def register(self, caches: Caches) -> None:
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

        self.engine.scheduler.use_v2_model_runner = True
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        try:
            self.driver = ActiveKVConnector(self.engine.config, caches)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def run(self, output: SchedulerOutput, model: Model) -> KVConnectorOutput:
        if not output.num_scheduled_tokens:
            result = self.driver.no_forward(output).kv_connector_output
        else:
            batch: Any = SimpleNamespace(
                idx_mapping=None,
                req_ids=list(output.num_scheduled_tokens),
                num_tokens=output.total_num_scheduled_tokens,
            )
            self.driver.pre_forward(output, batch)
            model()
            self.driver.finish_forward()
            result = self.driver.post_forward(output.finished_req_ids)
        return result or KVConnectorOutput()


class Runner033(RunnerV1):
    """A stub of what 0.33 changed, read in its source; the scheduler below it is the installed one.

    Between 0.32.0 and 0.33.0 the connector's base class gained `supports_sleep_mode`,
    `unregister_kv_caches` and `restore_kv_caches` (:meth:`sleep`); no call lost or changed an argument.
    The drivers of both model runners collect before `wait_for_save` when they put the end of a step off
    (:meth:`run`). The scheduler orders asynchronous loads late (:meth:`_admit`, :meth:`scheduling`), frees
    one that it had not ordered at once (:meth:`aborting`), and may take less than it was offered (a test
    of `test_metrics.py`). Outputs of a failed worker join the next step's: ours are sums over steps.
    """

    def register(self, caches: Caches) -> None:
        super().register(caches)
        connector = self.engine.connector
        self._order = connector.update_state_after_alloc
        self._put_off: dict[str, tuple[int, tuple[Any, ...]]] = {}
        connector.update_state_after_alloc = self._admit  # type: ignore[method-assign]

    def _admit(self, request: Any, blocks: Any, external: int) -> None:
        if external and self.engine.in_flight:
            self._put_off[request.request_id] = (len(self.engine.in_flight), (request, external))
        else:
            self._order(request, blocks, external)

    def scheduling(self) -> None:
        for name, (steps, (request, external)) in list(self._put_off.items()):
            if steps > 1:
                self._put_off[name] = (steps - 1, (request, external))
                continue
            del self._put_off[name]
            blocks = self.engine.scheduler.kv_cache_manager.get_blocks(name)
            self._order(request, blocks, external)

    def aborting(self, name: str) -> None:
        # A load that was put off never started, so 0.33 frees the blocks at once.
        if self._put_off.pop(name, None) is not None:
            self.engine.scheduler.finished_recving_kv_req_ids.add(name)

    def run(self, output: SchedulerOutput, model: Model) -> KVConnectorOutput:
        worker, meta = self.worker, output.kv_connector_metadata
        assert meta is not None
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        self.compute(output, model)
        report = self.collect(output)
        worker.wait_for_save()
        worker.clear_connector_metadata()
        return report

    def sleep(self) -> None:
        """The memory of the KV cache goes and comes back empty."""
        self.worker.unregister_kv_caches()
        self.worker.unregister_kv_caches()  # level 2 discards once more
        for memory in (rank.memory for rank in self.engine.ranks if rank.runner is self):
            memory.fill_(-1.0)
        self.worker.restore_kv_caches()


RUNNERS: dict[str, type[RunnerV1]] = {"v1": RunnerV1, "v2": RunnerV2, "0.33": Runner033}
