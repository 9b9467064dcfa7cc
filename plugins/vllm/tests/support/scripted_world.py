"""What the scripted engine runs on: the world that outlives it, and the real connector over that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig

from memory_store import MemoryStore
from scripted_caches import HEAD_SIZE, HEADS
from ucm_core.store.contract import Geometry
from ucm_vllm.connector import UCMConnector
from ucm_vllm.deployment import Deployment, Settings
from ucm_vllm.devices import HOST, KvDevice


class World:
    """What outlives an engine: the model, the directory of the namespace and the stored objects.

    ``windows``: per layer of the model the length of its sliding window, None for full attention,
    ``STATE`` or ``BESIDE``. ``state_mode``, ``interval``: vLLM's mamba_cache_mode and
    prefix_cache_retention_interval.
    """

    def __init__(
        self,
        folder: Path,
        *,
        auto: bool = True,
        windows: Sequence[int | str | None] = (None, None),
        state_mode: str = "align",
        interval: int | None = None,
    ) -> None:
        self.state_mode, self.interval = state_mode, interval
        self.folder = folder
        self.auto = auto
        self.windows = tuple(windows)
        self.objects: dict[bytes, list[bytes | None]] = {}
        self.faults: dict[bytes, Any] = {}
        self.stores: list[MemoryStore] = []
        self.settings: dict[str, Any] = {"model_id": "scripted"}
        self.model = folder / "model"
        self.model.mkdir(exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": len(self.windows),
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_SIZE,
            "vocab_size": 1024,
            "max_position_embeddings": 4096,
        }
        (self.model / "config.json").write_text(json.dumps(config))

    def use(self) -> None:
        """Connectors that are built from now on are of this world."""
        global _world
        _world = self

    def opener(self, role: str) -> Any:
        """What opens the stores of one side, "scheduler" or "worker"."""
        return self.open_store

    def open_store(self, geometry: Geometry, manifest: Any, device: KvDevice = HOST) -> MemoryStore:
        del device
        store = MemoryStore(geometry, auto=self.auto)
        store.objects, store.faults = self.objects, self.faults
        self.stores.append(store)
        return store


_world: World | None = None


class ScriptedConnector(UCMConnector):
    """The real connector over the current world's store."""

    @classmethod
    def _open(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: Any
    ) -> Deployment:
        assert _world is not None
        settings = Settings(roots=(_world.folder / "cache",), **_world.settings)
        opener = _world.opener(role.name.lower())
        return Deployment(vllm_config, kv_cache_config, settings, opener)

    tp_rank = 0

    def _ranks(self) -> tuple[int, int]:
        return 0, self.tp_rank

    def deployment_store(self) -> MemoryStore:
        """The store of a one-group model."""
        (store,) = self._deployment._stores.values()
        assert isinstance(store, MemoryStore)
        return store


def vllm_config(world: World, **overrides: Any) -> VllmConfig:
    kv = KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_role=overrides.pop("kv_role", "kv_both"),
        kv_connector_module_path="scripted_world",
        kv_load_failure_policy=overrides.pop("policy", "recompute"),
    )
    args: dict[str, Any] = {
        "model": str(world.model),
        "skip_tokenizer_init": True,
        "block_size": 32,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_transfer_config": kv,
    }
    args.update(overrides)
    return EngineArgs(**args).create_engine_config()
