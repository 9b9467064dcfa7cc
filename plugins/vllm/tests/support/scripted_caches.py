"""What the scripted engine keeps in its pages: layers, vLLM's specs and groups of them, views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

HEADS, HEAD_SIZE = 2, 4
#: In place of a window: the layer keeps a recurrent state instead of KV, or beside KV.
STATE, BESIDE = "state", "beside"
#: Floats of one layer's state: convolution and recurrence, packed one after the other.
STATE_SHAPES = ((3, 4), (2, 4))
STATE_SIZE = 20


def _spec(
    size: int, window: int | str | None, mla: bool, heads: int = HEADS, state_mode: str = "align"
) -> KVCacheSpec:
    if isinstance(window, str):
        return MambaSpec(
            block_size=size,
            shapes=STATE_SHAPES,
            dtypes=(torch.float32, torch.float32),
            page_size_padded=2 * heads * HEAD_SIZE * size * 4,
            mamba_cache_mode=state_mode,
        )
    if mla:
        return MLAAttentionSpec(
            block_size=size,
            num_kv_heads=1,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
            max_tp_shards=1,
        )
    shape: dict[str, Any] = {"num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": torch.float32}
    if window is not None:
        return SlidingWindowSpec(block_size=size, sliding_window=window, **shape)
    return FullAttentionSpec(block_size=size, **shape)


def _caches(
    layer: int, layers: int, window: int | str | None
) -> list[tuple[str, int | str | None]]:
    """vLLM's names of what a layer keeps. Beside KV, a state has a number after those of all layers."""
    if window == STATE:
        return [(f"model.layers.{layer}.mixer", STATE)]
    kept: list[tuple[str, int | str | None]] = [(f"model.layers.{layer}.self_attn.attn", window)]
    if window == BESIDE:
        kept = [(kept[0][0], None), (f"model.layers.{layer + layers}.mixer", STATE)]
    return kept


def _has_states(windows: Sequence[int | str | None]) -> bool:
    return STATE in windows or BESIDE in windows


def kv_cache_config(
    config: VllmConfig,
    blocks: int,
    *,
    mla: bool = False,
    windows: Sequence[int | str | None] = (None, None),
    state_mode: str = "align",
    interval: int | None = None,
) -> KVCacheConfig:
    """As vLLM builds it: its own grouping, and groups that overlay each other in one memory."""
    size = config.cache_config.block_size
    heads = HEADS // config.parallel_config.tensor_parallel_size
    specs = {
        name: _spec(size, window, mla, heads, state_mode)
        for i, of_layer in enumerate(windows)
        for name, window in _caches(i, len(windows), of_layer)
    }
    config.cache_config.kv_cache_layout = "LBHNC"
    if _has_states(windows):
        config.cache_config.mamba_cache_mode = state_mode
        config.cache_config.mamba_block_size = size
        config.cache_config.prefix_cache_retention_interval = interval
    groups = get_kv_cache_groups(config, specs)
    page = next(iter(specs.values())).page_size_bytes
    slots = max(len(group.layer_names) for group in groups)
    tensors = [
        KVCacheTensor(
            size=page * blocks * slots,
            layers=group.layer_names,
            layer_stride=page * blocks,
            block_stride=page,
        )
        for group in groups
    ]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
        hash_block_size=size,
        prefix_cache_retention_interval=interval if _has_states(windows) else None,
    )


@dataclass(frozen=True)
class Layer:
    """One layer of the scripted model. Layers of different groups share a ``slot`` of the memory."""

    index: int
    name: str
    group: int
    slot: int
    window: int | str | None

    @property
    def is_state(self) -> bool:
        return self.window == STATE

    def needed(self, start: int) -> np.ndarray:
        """Computed positions that a token at ``start`` still reads."""
        first = max(0, start - self.window + 1) if isinstance(self.window, int) else 0
        return np.arange(first, start)


def _layer(windows: Sequence[int | str | None], name: str, group: int, slot: int) -> Layer:
    index = extract_layer_index(name) % len(windows)
    kept = dict(_caches(index, len(windows), windows[index]))
    return Layer(index, name, group, slot, kept[name])


def layers_of(kv: KVCacheConfig, windows: Sequence[int | str | None]) -> list[Layer]:
    """All layers in the order in which the model runs them; a state after the KV beside it."""
    found = [
        _layer(windows, name, number, slot)
        for number, group in enumerate(kv.kv_cache_groups)
        for slot, name in enumerate(group.layer_names)
    ]
    return sorted(found, key=lambda layer: (layer.index, layer.is_state))


def state_pages(memory: torch.Tensor) -> torch.Tensor:
    """``float32[blocks, STATE_SIZE]``: a slot of the memory as a layer of states has it."""
    return memory.reshape(memory.shape[0], -1)[:, :STATE_SIZE]


def state_tensor(memory: torch.Tensor) -> torch.Tensor:
    """``int8[blocks, 1, 1, bytes]``: the same as vLLM registers it."""
    return state_pages(memory).view(torch.int8)[:, None, None]
