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
            name="vllm",
            distribution="vllm",
            tested_versions=("0.32",),
            turn_on=(
                "vllm serve MODEL --kv-transfer-config "
                '\'{"kv_connector":"UCMConnector","kv_role":"kv_both",'
                '"kv_load_failure_policy":"recompute"}\''
            ),
            notes=("tested with model runner V1 on the CPU platform",),
        )
    )
