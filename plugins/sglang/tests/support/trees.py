"""SGLang's real radix tree, hybrid controller, host pools and storage threads over our backend: no model.

The fixtures are SGLang's own (``sglang.test.kits.unified_radix_cache``).
"""

from __future__ import annotations

import json
import time
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

import host_pools

_WAIT_S = 20.0

FULL = CacheConfig(page_size=16, components=(ComponentType.FULL,))
SLIDING = CacheConfig(
    page_size=4, components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=8
)
STATES = CacheConfig(
    page_size=4,
    components=(ComponentType.FULL, ComponentType.MAMBA),
    enable_mamba_extra_buffer=True,
    mamba_cache_size=60,
)


def backend_options(root: Path) -> dict[str, Any]:
    """The extra configuration that gives SGLang our backend over ``root``."""
    return {
        "backend_name": "ucm",
        "module_path": "ucm_sglang.backend",
        "class_name": "UCMStorage",
        "interface_v1": 1,
        "store_pipeline": "Posix",
        "storage_backends": str(root),
        "staging_buffer_gb": "16 MiB",
        "model_id": "tree",
    }


def model_of_kit(config: CacheConfig, patch: pytest.MonkeyPatch) -> None:
    """The server runs the model that the kit's pools belong to: no checkpoint has their heads and layers."""
    from ucm_sglang import deployment

    _, allocator, _ = fixtures.build_fixture(config)
    kv = allocator.get_kvcache()
    full = getattr(kv, "full_kv_pool", kv)
    heads, layers = int(full.head_num), int(full.layer_num)
    read = deployment.read_server

    def read_server() -> Any:
        server, problems = read()
        return replace(server, kv_heads=heads, layers=layers), problems

    patch.setattr(deployment, "read_server", read_server)


class _Kit(UnifiedRadixCacheFixtures):
    """The kit's methods without its test case."""

    def __init__(self, config: CacheConfig) -> None:
        self.cfg = config

    def addCleanup(self, *_: Any, **__: Any) -> None:
        pass

    def assertTrue(self, value: Any, message: str | None = None) -> None:
        assert value, message

    def assertNotEqual(self, left: Any, right: Any) -> None:
        assert left != right

    def assertGreater(self, left: Any, right: Any) -> None:
        assert left > right


@dataclass
class Tree:
    """One server's caches: device pools, host pools, tree, and the backend below ``root``."""

    config: CacheConfig
    root: Path
    model: Path
    layout: str = "page_first_direct"
    kit: _Kit = field(init=False)
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        self.kit = _Kit(self.config)
        parallel = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        parallel.__enter__()
        # The fixtures set server arguments of their own: ours come after them.
        self.cache, self.allocator, self.requests = fixtures.build_fixture(self.config)
        server = ServerArgs(
            model_path="dummy",
            page_size=self.config.page_size,
            hicache_io_backend="direct",
            hicache_mem_layout=self.layout,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(
                {**backend_options(self.root), "prefetch_threshold": 1}
            ),
        )
        server.model_path = str(self.model)
        server._mamba_cache_chunk_size = max(64, self.config.page_size)
        set_global_server_args_for_scheduler(server)
        self.cache.init_hicache(server, self.cache.cache_init_params)
        fixtures.drop_hicache_atexit_pin(self.cache)
        self.cache.write_through_threshold = 1 << 30  # the test says when
        self.cache.load_back_threshold = 0
        controller = self.cache.cache_controller
        controller.prefetch_capacity_limit = controller.mem_pool_host.size

    @property
    def backend(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def prompt(self, pages: int, seed: int = 1) -> list[int]:
        return list(self.kit._make_seq(seed, pages))

    def compute(self, tokens: list[int]) -> Any:
        """The engine has computed ``tokens``: random KV and states; returns the tree's leaf."""
        self.kit._insert(self.cache, self.allocator, self.requests, tokens)
        generator = torch.Generator().manual_seed(len(tokens))
        for buffer in self._buffers():
            random = torch.randn(buffer.shape, generator=generator)
            buffer.copy_(random.to(buffer.dtype))
        return fixtures.match_prefix(self.cache, tokens).last_device_node

    def save(self, leaf: Any) -> None:
        """Device to host to storage, by SGLang's threads."""
        self.kit._backup_node(self.cache, leaf)
        for node in self.kit._path_chain(self.cache, leaf):
            self.cache.write_backup_storage(node)
        self._until(lambda: not self.cache.ongoing_backup, self.cache.drain_storage_control_queues)

    def serve(self, tokens: list[int]) -> tuple[int, Any]:
        """A request with an empty device and host cache: tokens restored, and the tree's leaf."""
        handle = CacheRequestHandle("request", 0)
        key = array("q", tokens)
        self.cache.prefetch_from_storage(handle, self.cache.root_node_handle(), key, None, None)
        self._until(
            lambda: self.cache.check_prefetch_progress(handle), self.cache.check_hicache_events
        )
        request = self.kit._load_back_through_admission(self.cache, self.requests, tokens)
        if request.host_hit_length:
            self.kit._finish_pending_loads(self.cache)
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(key)))
        return int(match.device_prefix_len), match.last_device_node

    def content(self, leaf: Any) -> dict[str, Any]:
        """Everything a model would read when it continues behind ``leaf``."""
        where = self.cache.path_device_indices(leaf)
        full, sliding, states = self._pools()
        found = {"full": torch.stack([b[where] for b in (*full.k_buffer, *full.v_buffer)])}
        if sliding is not None:
            window = -(-self.config.sliding_window_size // self.config.page_size)
            last = where[-min(len(where), window * self.config.page_size) :]
            rows = self.allocator.full_to_swa_index_mapping[last]
            assert (rows > 0).all(), "the window is not there"
            found["swa"] = torch.stack([b[rows] for b in (*sliding.k_buffer, *sliding.v_buffer)])
        if states is not None:
            slot = fixtures.node_device_value(self.cache, leaf, ComponentType.MAMBA)
            parts = (*states.mamba_cache.conv, states.mamba_cache.temporal)
            found["state"] = torch.cat([part[:, slot].reshape(-1).float() for part in parts])
        return found

    def close(self) -> None:
        backend = self.backend
        self.cache.cache_controller._stop_storage_threads()
        backend.close()

    def _pools(self) -> tuple[Any, Any, Any]:
        kv = self.allocator.get_kvcache()
        return (
            getattr(kv, "full_kv_pool", kv),
            getattr(kv, "swa_kv_pool", None),
            getattr(self.requests, "mamba_pool", None),
        )

    def _buffers(self) -> list[Any]:
        full, sliding, states = self._pools()
        found = [b for pool in (full, sliding) if pool for b in (*pool.k_buffer, *pool.v_buffer)]
        if states is not None:
            found += [*states.mamba_cache.conv, states.mamba_cache.temporal]
        return found

    @staticmethod
    def _until(done: Any, step: Any) -> None:
        deadline = time.monotonic() + _WAIT_S
        while True:
            step()
            if done():
                return
            assert time.monotonic() < deadline, "SGLang's storage threads did not finish"
            time.sleep(0.002)


__all__ = ["FULL", "SLIDING", "STATES", "Tree", "host_pools"]
