"""``hybrid_process.py ROOT REQUESTS``: a serving process of a hybrid model over files.

REQUESTS is JSON: ``[[shared, own], ...]``, each a prompt of tokens ``0 .. shared`` and then up to 330 in all
from ``own`` on. Prints ``[[continued at, states left], ...]``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from host import GEOMETRY, Host, hybrid, prompt

from ucm_core.plugins import PluginHost
from ucm_core.registry import StageContext
from ucm_core.store.config import StoreConfig
from ucm_core.store.native_store import NativeBlockStore
from ucm_core.store.pipeline import open_store

TOKENS = 330


def main(root: str, requests: str) -> None:
    plugins = PluginHost(env={})

    def open_row(name: str) -> NativeBlockStore:
        (Path(root) / name).mkdir(exist_ok=True)
        config = plugins.stage("Posix").config_model(storage_backends=f"{root}/{name}")
        return open_store(
            "Posix",
            stages=plugins.stages,
            pipelines=plugins.pipelines,
            stage_configs={"Posix": config},
            store_config=StoreConfig(staging_buffer_gb=4 << 20),
            context=StageContext(GEOMETRY, "hybrid", bytes(32), "worker"),
        )

    host = Host(hybrid(interval=64), open_row)
    told = []
    for shared, own in json.loads(requests):
        told.append(host.serve(prompt(range(shared), range(own, own + TOKENS - shared))))
    print(json.dumps(told))
    host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
