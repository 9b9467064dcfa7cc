"""Real host pools of SGLang and a backend over them, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from tiny_models import ensure_model

import sglang_on_cpu

sglang_on_cpu.install()

PAGE = 64
#: What the generated models have.
LAYERS, HEADS, HEAD_SIZE = 4, 2, 32
MLA_LAYERS, LATENT, ROPE = 3, 512, 64


def serve(model: str | Path = "llama", page: int = PAGE, **arguments: Any) -> None:
    """This process is the scheduler of a server of ``model`` (a generated one, or a directory)."""
    path = str(model) if isinstance(model, Path) else str(ensure_model(model))
    server = ServerArgs(
        model_path=path, page_size=page, device="cpu", skip_tokenizer_init=True, **arguments
    )
    set_global_server_args_for_scheduler(server)


def gqa_pool(
    layout: str = "page_first",
    *,
    pages: int = 16,
    page: int = PAGE,
    heads: int = HEADS,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """``heads``: of this rank."""
    device = MHATokenToKVPool(
        size=page,
        page_size=page,
        dtype=dtype,
        head_num=heads,
        head_dim=HEAD_SIZE,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    return MHATokenToKVPoolHost(
        info,
        float(pages),
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=page,
        start_layer=0,
        end_layer=layers - 1,
    )


def mla_pool(layout: str = "page_first", *, pages: int = 16, page: int = PAGE) -> Any:
    device = MLATokenToKVPool(
        size=page,
        page_size=page,
        dtype=torch.bfloat16,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        layer_num=MLA_LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    return MLATokenToKVPoolHost(
        info,
        float(pages),
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=page,
        start_layer=0,
        end_layer=MLA_LAYERS - 1,
        target_layer_num=MLA_LAYERS,
    )


def storage_config(extra: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    told: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny",
    }
    return HiCacheStorageConfig(**(told | changes), extra_config=extra)


@dataclass
class Rank:
    """A backend as SGLang attaches it to ``pool``."""

    root: Path
    pool: Any = field(default_factory=gqa_pool)
    options: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    backend: Any = field(init=False)

    def __post_init__(self) -> None:
        extra = {
            "backend_name": "ucm",
            "module_path": "ucm_sglang.backend",
            "class_name": "UCMStorage",
            "interface_v1": 1,
            "store_pipeline": "Posix",
            "storage_backends": str(self.root),
            "staging_buffer_gb": "64 MiB",
            **self.options,
        }
        config = storage_config(extra, **self.told)
        self.backend = StorageBackendFactory.create_backend("dynamic", config, None)
        self.backend.register_mem_pool_host(self.pool)
        self.backend.register_mem_host_pool_v2(self.pool, PoolName.KV)
        self.backend.on_host_pools_registered()

    def fill(self, pages: int) -> Any:
        """Host indices of ``pages`` new pages with random content."""
        indices = self.pool.alloc(pages * self.pool.page_size)
        generator = torch.Generator().manual_seed(pages)
        for number in range(pages):
            first = int(indices[number * self.pool.page_size])
            page = self.pool.get_data_page(first)
            random = torch.randn(page.shape, generator=generator).to(page.dtype)
            self.pool.set_from_flat_data_page(first, random)
        return indices

    def empty(self, pages: int) -> Any:
        """Host indices of ``pages`` new pages of zeros."""
        indices = self.pool.alloc(pages * self.pool.page_size)
        for first in indices[:: self.pool.page_size].tolist():
            self.pool.set_from_flat_data_page(
                first, torch.zeros_like(self.pool.get_data_page(first))
            )
        return indices

    def pages(self, indices: Any) -> list[Any]:
        """Copies of the flat pages at ``indices``."""
        return [self.pool.get_data_page(int(i)).clone() for i in indices[:: self.pool.page_size]]

    def close(self) -> None:
        self.backend.close()


def keys(pages: int, page: int = PAGE, seed: int = 0) -> list[str]:
    """SGLang's own keys of a prompt of ``pages`` whole pages."""
    return list(get_hash_str([seed + i for i in range(pages * page)], None, page_size=page))


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )
