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
            name="sglang",
            distribution="sglang",
            tested_versions=("0.5.23",),
            turn_on=(
                "python -m sglang.launch_server --model-path MODEL --page-size 64 "
                "--enable-hierarchical-cache --hicache-mem-layout page_first "
                "--hicache-storage-backend dynamic --hicache-storage-backend-extra-config "
                '\'{"backend_name":"ucm","module_path":"ucm_sglang.backend",'
                '"class_name":"UCMStorage","interface_v1":1}\''
            ),
            notes=(
                "tested on the CPU; page_first_direct with --hicache-io-backend direct as well",
            ),
        )
    )
