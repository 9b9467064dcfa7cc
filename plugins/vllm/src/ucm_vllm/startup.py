"""Start: read the configuration, say what was chosen, warn about what will disappoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm_core.errors import UnsupportedError
from ucm_vllm.deployment import Deployment

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def open_deployment(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: str
) -> Deployment:
    raise UnsupportedError("not wired yet")
