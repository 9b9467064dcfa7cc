"""Entry point of the ``ucm`` plugin group: says which engine this is and how to turn it on."""

from __future__ import annotations

from collections.abc import Callable

from ucm_core.hookspecs import hookimpl
from ucm_core.registry import EngineSpec

UCM_API_VERSION = (1, 0)


@hookimpl
def ucm_register_engines(register: Callable[[EngineSpec], None]) -> None:
    register(
        EngineSpec(
            name="trtllm",
            distribution="tensorrt-llm",
            tested_versions=(),
            turn_on=(
                "kv_connector_config: {connector_module: ucm_trtllm.connector, "
                "connector_scheduler_class: UCMScheduler, connector_worker_class: UCMWorker}"
            ),
            notes=("interfaces of 1.2 and 1.3, tested on an executor stub; no release ran here",),
        )
    )
