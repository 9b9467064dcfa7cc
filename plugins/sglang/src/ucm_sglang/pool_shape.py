"""What a host pool of SGLang holds, in the words of the core; pools that nobody has looked at are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ucm_core.adapter.layout import ITEM_BYTES, LayoutDescriptor
from ucm_core.identity.model_config import KV_DTYPES
from ucm_core.store.contract import Geometry, RunShape
from ucm_sglang.pages import Addresses, PageTable

Kind = Literal["kv", "latent", "state"]

#: Pools by exact class name: a subclass may keep other bytes under the same page.
POOL_KINDS: dict[str, Kind] = {
    "MHATokenToKVPoolHost": "kv",
    "MLATokenToKVPoolHost": "latent",
    "MambaPoolHost": "state",
}
#: 8-bit floats, by SGLang's names and ours.
FP8 = ("fp8_e4m3", "fp8_e5m2")
#: Axes of a page inside K (and inside V), outermost first.
_ORDERS = {
    "page_first": ("token", "layer", "head"),
    "page_first_direct": ("layer", "token", "head"),
    "page_head": ("head", "token", "layer"),
}
LAYOUTS = {
    "kv": tuple(_ORDERS),
    "latent": ("page_first", "page_first_direct"),
    "state": ("page_first", "page_first_direct"),
}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """``heads``: kv heads of this rank, 1 for latent rows and states. ``head_size``: elements of K of a
    head, of a whole latent row, or bytes of all states. ``dtype``: canonical name."""

    name: str
    kind: Kind
    order: str
    tokens: int
    layers: int
    heads: int
    head_size: int
    dtype: str
    pages: PageTable

    def layout(self, heads: int) -> LayoutDescriptor:
        """Of an object with ``heads`` heads of a page."""
        if self.kind == "state":
            parts = "-".join(map(str, self.pages.nbytes))
            tag = f"opaque.sglang_state_{self.dtype}_{parts}"
            return LayoutDescriptor.parse(f"{tag}|elem:{self.pages.page_bytes}")
        sizes = {"token": self.tokens, "layer": self.layers, "head": heads}
        axes = [f"{dim}:{sizes[dim]}" for dim in _ORDERS[self.order]]
        kv = ["kv:2"] if self.kind == "kv" else []
        return LayoutDescriptor.parse(
            f"{self.dtype}|{','.join([*kv, *axes, f'elem:{self.head_size}'])}"
        )

    def cut(self, first: int, last: int) -> PageCut:
        """Heads ``[first, last)`` of a page as an object of their own."""
        layout = self.layout(last - first)
        shards = layout.shard_count
        if self.kind == "state":
            runs = tuple(RunShape(nbytes) for nbytes in self.pages.nbytes)
            return PageCut(layout, 1, runs, np.arange(len(runs)), np.zeros(len(runs), np.uint64))
        part = self.pages.nbytes[0]
        parts = len(self.pages.nbytes)
        if shards > 1:  # latent rows, layers outermost: a shard a layer
            nbytes = part // shards
            return PageCut(
                layout,
                shards,
                (RunShape(nbytes),),
                np.zeros(shards, np.int64),
                np.arange(shards, dtype=np.uint64) * np.uint64(nbytes),
            )
        run, offset = self._run(first, last, part)
        return PageCut(
            layout, 1, (run,) * parts, np.arange(parts), np.full(parts, offset, np.uint64)
        )

    def _run(self, first: int, last: int, part: int) -> tuple[RunShape, int]:
        share, offset = part // self.heads * (last - first), part // self.heads * first
        if last - first == self.heads:
            return RunShape(part), 0
        if self.order == "page_head":
            return RunShape(share), offset
        cell = self.head_size * ITEM_BYTES[self.dtype]  # one token, layer and head
        rows = part // (self.heads * cell)
        return RunShape((last - first) * cell, rows, self.heads * cell), first * cell


@dataclass(frozen=True, slots=True)
class PageCut:
    """An object in a page: run ``r`` of the object lies at part ``part[r]``'s address plus ``offset[r]``.

    ``runs``: the shapes of one shard's runs.
    """

    layout: LayoutDescriptor
    shards: int
    runs: tuple[RunShape, ...]
    part: Any
    offset: Addresses

    @property
    def geometry(self) -> Geometry:
        shapes = self.runs if len(set(self.runs)) > 1 else self.runs[:1]
        return Geometry(
            shard_count=self.shards,
            shard_bytes=sum(run.nbytes * run.count for run in self.runs),
            runs_per_shard=len(self.runs),
            run=shapes[0],
            layout=str(self.layout),
            more_runs=shapes[1:],
        )

    def addresses(self, parts: Addresses) -> Addresses:
        """``parts``: ``uint64[N, P]`` of pages. ``uint64[N * shards, runs]``, shards of a page together."""
        table: Addresses = parts[:, self.part] + self.offset
        return np.ascontiguousarray(table.reshape(-1, len(self.runs)))


def pool_problems(name: str, pool: Any, told: str) -> list[str]:
    """Why a pool cannot be stored, with the way out; empty when it can."""
    made = type(pool).__name__
    kind = POOL_KINDS.get(made)
    where = f"host pool {name!r} ({made})"
    if kind is None:
        return [
            f"{where}: nobody has looked at the bytes of such pools; known are {', '.join(POOL_KINDS)}. "
            "Start without the feature that brings it, or without a storage backend"
        ]
    problems = []
    if pool.layout not in LAYOUTS[kind]:
        problems.append(
            f"{where}: a page of layout {pool.layout} lies in many pieces or in an order that cannot be "
            "stored; start SGLang with --hicache-mem-layout page_first, or page_first_direct with "
            f"--hicache-io-backend direct (this pool works with {', '.join(LAYOUTS[kind])})"
        )
    packed = int(getattr(pool, "layer_num", 0)) - int(getattr(pool, "target_layer_num", 0))
    if kind != "state" and getattr(pool, "target_layer_num", None) is not None and packed:
        problems.append(
            f"{where}: {packed} layers of a draft model are packed into its pages, which is not supported; "
            "start without speculative decoding"
        )
    if getattr(pool, "dsa_kv_cache_store_fp8", False) or getattr(
        pool, "_layer_shard_enabled", False
    ):
        problems.append(
            f"{where}: rows packed with their scales, or layers spread over ranks, are not supported; start "
            "with --kv-cache-dtype auto and without layer sharding"
        )
    found = kv_dtype(pool, told)
    if kind != "state" and found not in ITEM_BYTES:
        problems.append(
            f"{where}: elements of type {found} are not supported; say --kv-cache-dtype fp8_e4m3 or fp8_e5m2 "
            "where that is meant"
        )
    return problems


def kv_dtype(pool: Any, told: str) -> str:
    """Canonical element type of a pool, torch's own name where there is none.

    ``told``: the server's ``kv_cache_dtype``. SGLang keeps 8-bit floats as plain bytes, of which that alone
    says what they mean.
    """
    named = str(pool.dtype).removeprefix("torch.")
    if named == "uint8" or named.startswith("float8"):
        return told if told in FP8 else f"{named} (kv_cache_dtype {told})"
    return KV_DTYPES.get(named, named)


def pool_shape(name: str, pool: Any, told: str) -> PoolShape:
    """The shape of a pool without problems."""
    kind, pages = POOL_KINDS[type(pool).__name__], PageTable.measure(pool)
    if kind == "state":
        return PoolShape(
            name,
            kind,
            pool.layout,
            1,
            int(pool.num_mamba_layers),
            1,
            pages.page_bytes,
            kv_dtype(pool, told),
            pages,
        )
    latent = kind == "latent"
    return PoolShape(
        name=name,
        kind=kind,
        order=pool.layout,
        tokens=int(pool.page_size),
        layers=int(pool.layer_num),
        heads=1 if latent else int(pool.head_num),
        head_size=int(pool.kv_cache_dim if latent else pool.head_dim),
        dtype=kv_dtype(pool, told),
        pages=pages,
    )
