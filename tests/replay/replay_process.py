"""``replay_process.py ROOT BEGIN END``: a serving process over files; prints its hits."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from conversation import GEOMETRY, replay

from ucm_core.plugins import PluginHost
from ucm_core.registry import StageContext
from ucm_core.store.config import StoreConfig
from ucm_core.store.pipeline import open_store


def main(root: str, begin: str, end: str) -> None:
    host = PluginHost(env={})
    store = open_store(
        "Posix",
        stages=host.stages,
        pipelines=host.pipelines,
        stage_configs={"Posix": host.stage("Posix").config_model(storage_backends=root)},
        store_config=StoreConfig(staging_buffer_gb=16 << 20),
        context=StageContext(GEOMETRY, "trace", bytes(32), "worker"),
    )
    with store:
        print(replay(store, int(begin), int(end)))


if __name__ == "__main__":
    main(*sys.argv[1:])
