"""The scripted engine over real pipelines: vLLM's scheduler, our native stores, files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_harness.tamper import objects
from scripted_engine import World
from ucm_core.config.load import load_config
from ucm_core.plugins import PluginHost
from ucm_core.registry import StageContext
from ucm_core.store.contract import BlockStore, Geometry
from ucm_core.store.pipeline import open_store
from ucm_vllm.devices import HOST, KvDevice


class RealWorld(World):
    """Stores of ``pipeline`` below ``folder/cache``; ``options``: keys as an operator writes them."""

    def __init__(self, folder: Path, pipeline: str, **options: Any) -> None:
        super().__init__(folder)
        self._host = PluginHost().load()
        inner = {
            "store_pipeline": pipeline,
            "storage_backends": str(folder / "cache"),
            "store_health": {"enabled": False},
            **options,
        }
        connector = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": inner}
        self._config = load_config({"ucm_connectors": [connector]}, host=self._host)

    def opener(self, role: str) -> Any:
        def opened(geometry: Geometry, manifest: Any, device: KvDevice = HOST) -> BlockStore:
            context = StageContext(
                geometry=geometry,
                namespace_dir_name=manifest.directory_name,
                namespace_digest=manifest.digest,
                role="scheduler" if role == "scheduler" else "worker",
                local_rank=0,
                local_rank_size=1,
                timeout_ms=5_000,
                owner=f"test {role}",
            )
            store = open_store(
                self._config.pipeline.name,
                stages=self._host.stages,
                pipelines=self._host.pipelines,
                stage_configs=self._config.stages,
                store_config=self._config.store,
                context=context,
            )
            self.stores.append(store)  # type: ignore[arg-type]
            return store

        return opened

    def files(self) -> list[Path]:
        """Stored objects."""
        return objects(self.folder / "cache")
