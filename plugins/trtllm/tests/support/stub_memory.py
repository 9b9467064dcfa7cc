"""KV memory of the stub's ranks, and what must lie in it: both pool forms, NumPy only.

What a token's KV is follows from all tokens before it, the salt, and layer, K or V, head and element. So a
page that holds another prefix, another head or another layer is found out wherever it is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stub_interface import (
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
)

_PRIME = 2147483647
POISON = 0xA5


@dataclass(frozen=True)
class Shape:
    """A model and its pool. ``windows``: per layer group its window (None: full attention) and layers;
    ``scales``: bytes per token and head of a second region (block scales), 0: none."""

    layers: int = 2
    heads: int = 2
    head_size: int = 4
    latent: bool = False
    page_tokens: int = 8
    pages: int = 64
    groups: tuple[tuple[int | None, tuple[int, ...]], ...] = ()
    scales: int = 0
    dtype: str = "float32"

    @property
    def layer_groups(self) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
        return self.groups or ((None, tuple(range(self.layers))),)

    @property
    def kv(self) -> int:
        return 1 if self.latent else 2


def prefix_state(tokens: list[int], salt: str = "") -> list[int]:
    """One number a token: of everything up to it."""
    state = 7 + sum((at + 1) * byte for at, byte in enumerate(salt.encode()))
    found = []
    for token in tokens:
        state = (state * 48271 + token + 1) % _PRIME
        found.append(state)
    return found


def next_token(state: int) -> int:
    return 3 + state % 997


def cells(
    states: npt.NDArray[np.int64], layer: int, heads: range, shape: Shape
) -> npt.NDArray[np.float32]:
    """``float32[kv, heads, tokens, head_size]``."""
    kv = np.arange(shape.kv).reshape(-1, 1, 1, 1)
    head = np.array(heads).reshape(1, -1, 1, 1)
    elem = np.arange(shape.head_size).reshape(1, 1, 1, -1)
    place = ((layer * 2 + kv) * 64 + head) * 1024 + elem + 1
    values = (states.reshape(1, 1, -1, 1) % 999983) * (place % 8191) % 16777213
    return values.astype(np.float32)


class PoolTensor:
    """What the adapter reads of V1's torch tensor, over NumPy."""

    def __init__(self, array: npt.NDArray[Any], dtype: str) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = f"torch.{dtype}"
        self.device = type("Device", (), {"type": "cpu", "index": None})()

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


@dataclass
class RankMemory:
    """One rank's pools: per layer group ``[pages, layers, kv, heads, tokens, head_size]``."""

    shape: Shape
    heads: range
    pools: list[npt.NDArray[Any]] = field(default_factory=list)
    scales: list[npt.NDArray[np.uint8]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        dtype = {"float32": np.float32, "bfloat16": np.uint16}[shape.dtype]
        for _, layers in shape.layer_groups:
            inner = (len(self.heads), shape.page_tokens, shape.head_size)
            pool = np.zeros((shape.pages, len(layers), shape.kv, *inner), dtype)
            pool.view(np.uint8)[:] = POISON
            self.pools.append(pool)
            nbytes = len(self.heads) * shape.page_tokens * shape.scales
            self.scales.append(
                np.full((shape.pages, len(layers), shape.kv, nbytes), POISON, np.uint8)
            )

    def tensor(self) -> PoolTensor:
        (pool,) = self.pools
        flat = pool.reshape(*pool.shape[:3], -1)
        return PoolTensor(flat, self.shape.dtype)

    def layout(self) -> KvCacheLayout:
        shape, groups = self.shape, []
        roles = ("key",) if shape.latent else ("key", "value")
        for number, (window, layers) in enumerate(shape.layer_groups):
            pool, scales = self.pools[number], self.scales[number]
            regions = [_region(pool, layers, roles)]
            if shape.scales:
                regions.append(_region(scales, layers, tuple(f"{r}_block_scale" for r in roles)))
            groups.append(KvCacheLayerGroupLayout(number, tuple(layers), window, tuple(regions)))
        single = self.tensor() if len(self.pools) == 1 and not shape.scales else None
        return KvCacheLayout(shape.page_tokens, tuple(groups), single=single)

    # -- writing and checking ------------------------------------------------------------------------

    def write(self, group: int, page: int, slot: int, states: list[int]) -> None:
        """A token after another, from ``slot`` of a page on."""
        array = np.array(states, np.int64)
        _, layers = self.shape.layer_groups[group]
        for at, layer in enumerate(layers):
            values = cells(array, layer, self.heads, self.shape)
            self.pools[group][page, at, :, :, slot : slot + len(states)] = _as(
                values, self.shape.dtype
            )
            if self.shape.scales:
                scale = self._scales(array, layer)
                view = self._scale_view(group, page, at)
                view[:, :, slot : slot + len(states)] = scale

    def wrong(self, group: int, page: int, slot: int, states: list[int]) -> bool:
        """Does the page hold anything else for these tokens?"""
        array = np.array(states, np.int64)
        _, layers = self.shape.layer_groups[group]
        for at, layer in enumerate(layers):
            wanted = _as(cells(array, layer, self.heads, self.shape), self.shape.dtype)
            found = self.pools[group][page, at, :, :, slot : slot + len(states)]
            if not np.array_equal(found, wanted):
                return True
            if self.shape.scales:
                held = self._scale_view(group, page, at)[:, :, slot : slot + len(states)]
                if not np.array_equal(held, self._scales(array, layer)):
                    return True
        return False

    def poison(self, group: int, page: int) -> None:
        self.pools[group][page].view(np.uint8)[...] = POISON
        self.scales[group][page] = POISON

    def _scale_view(self, group: int, page: int, at: int) -> npt.NDArray[np.uint8]:
        shape = self.shape
        inner = (shape.kv, len(self.heads), shape.page_tokens, shape.scales)
        return self.scales[group][page, at].reshape(inner)

    def _scales(self, states: npt.NDArray[np.int64], layer: int) -> npt.NDArray[np.uint8]:
        shape = self.shape
        head = np.array(self.heads).reshape(1, -1, 1, 1)
        kv = np.arange(shape.kv).reshape(-1, 1, 1, 1)
        unit = np.arange(shape.scales).reshape(1, 1, 1, -1)
        values = states.reshape(1, 1, -1, 1) + 31 * layer + 7 * head + 3 * kv + unit
        return (values % 251).astype(np.uint8)


def _region(
    array: npt.NDArray[Any], layers: tuple[int, ...], roles: tuple[str, ...]
) -> KvCacheRegion:
    size = array[0].nbytes
    buffers = tuple(KvCacheBufferRef(layer, role) for layer in layers for role in roles)
    return KvCacheRegion(array.ctypes.data, size, size, len(array), buffers)


def _as(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype == "float32":
        return values
    return (values.view(np.uint32) >> 16).astype(np.uint16)
