"""From vLLM's configuration and ours to the two sides: coordinates, seeds, geometries, stores.

``Deployment`` is the same object in the scheduler and in every worker; each builds its side from it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ucm_core.adapter.blocks import PageMap
from ucm_core.errors import UnsupportedError
from ucm_core.identity import DEFAULT_BLOCK_TOKENS, Manifest, open_namespace
from ucm_core.spec import Coordinate, SeededCoordinate
from ucm_core.store.contract import BlockStore, Geometry
from ucm_vllm.facts import Facts, read_facts
from ucm_vllm.identity import AdapterKeys, find_weights, kv_dtype, model_identity
from ucm_vllm.lookup import LookupService
from ucm_vllm.placement import Placement, fitting_block_tokens, object_layout, page_grid
from ucm_vllm.scheduler import SchedulerSide
from ucm_vllm.worker import Lane, WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger("ucm.vllm")

DEFAULT_NAMESPACE = "default"
#: A lookup that takes longer is a miss: recomputing is better than a stalled queue.
LOOKUP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator chose, or what was chosen for them; see ``startup.py``."""

    roots: tuple[Path, ...]
    namespace: str | None = None
    block_tokens: int | None = None
    head_slices: int | None = None
    model_id: str | None = None
    timeout_ms: int = 30_000
    persist_token_threshold: int = 0
    use_lite: bool = False
    #: Stages of the pipeline, top to bottom.
    tiers: tuple[str, ...] = ()


class OpenStore(Protocol):
    """Opens one pipeline bound to one geometry of the namespace, for this process."""

    def __call__(self, geometry: Geometry, manifest: Manifest) -> BlockStore: ...


@dataclass(slots=True)
class Deployment:
    """Everything both sides derive alike. Owns the stores it opened: call :meth:`close`."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    settings: Settings
    open_store: OpenStore
    facts: Facts = field(init=False)
    manifest: Manifest = field(init=False)
    placement: Placement = field(init=False)
    weights_source: str = field(init=False)
    _stores: dict[str, BlockStore] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = read_facts(self.vllm_config, self.kv_cache_config)
        self.manifest = self._namespace()
        weights = find_weights(self.vllm_config, self.settings.model_id)
        self.weights_source = weights.source
        dtype = kv_dtype(self.facts)
        grid = page_grid(self.facts, self.manifest.block_tokens)
        # The bytes are stored as this engine lays them out. Until a reader can transpose them, another
        # layout is another identity: a clean miss instead of a load that always fails.
        heads = max(1, self.facts.total_heads // self.manifest.head_slices)
        layout = str(object_layout(self.facts, grid, dtype, layers=1, heads=heads))
        identity = model_identity(self.vllm_config, self.facts, weights).with_extra(layout=layout)
        self.placement = Placement.build(self.facts, identity, self.manifest, dtype)

    def _namespace(self) -> Manifest:
        """Open the namespace, or choose one that fits when the operator named none."""
        settings, facts = self.settings, self.facts
        fitting = fitting_block_tokens(facts, DEFAULT_BLOCK_TOKENS)
        if settings.namespace is not None and settings.roots:
            return open_namespace(
                settings.roots,
                settings.namespace,
                block_tokens=settings.block_tokens,
                head_slices=settings.head_slices,
                first_block_tokens=fitting,
                first_head_slices=facts.shards,
            )
        # Another block size or head split is another namespace: the default start must not fail
        # because an earlier one chose differently.
        tokens = settings.block_tokens or fitting
        slices = settings.head_slices or facts.shards
        name = settings.namespace or DEFAULT_NAMESPACE
        if tokens != DEFAULT_BLOCK_TOKENS:
            name += f"-b{tokens}"
        if slices != 1:
            name += f"-h{slices}"
        if not settings.roots:  # a pipeline without directories has nowhere to keep a manifest
            return Manifest(name, tokens, slices)
        return open_namespace(settings.roots, name, block_tokens=tokens, head_slices=slices)

    # -- coordinates, geometry, stores -------------------------------------------------------------

    def geometry(self, coordinate: Coordinate) -> Geometry:
        """One shard per layer; a shard is the coordinate's heads of every piece of a stored block."""
        run, _ = self.placement.run(coordinate)
        pieces = self.placement.grid.pieces
        return Geometry(
            shard_count=len(coordinate.layers),
            shard_bytes=pieces * run.nbytes * run.count,
            runs_per_shard=pieces,
            run=run,
            layout=str(self.placement.layout(coordinate)),
        )

    def store_name(self, at: SeededCoordinate) -> str:
        """Which store holds a coordinate: objects of one shape share one."""
        return f"{at.row.store}/{len(at.coordinate.layers)}"

    def store(self, at: SeededCoordinate) -> BlockStore:
        """The store of a coordinate; opened on first use."""
        name = self.store_name(at)
        if name not in self._stores:
            self._stores[name] = self.open_store(self.geometry(at.coordinate), self.manifest)
        return self._stores[name]

    # -- the two sides -------------------------------------------------------------------------------

    def scheduler_side(self) -> SchedulerSide:
        """Looks up every coordinate of the model; moves no bytes."""
        transfer = self.vllm_config.kv_transfer_config
        assert transfer is not None
        stores = {self.store_name(at): self.store(at) for at in self.placement.all()}
        lite = self.settings.use_lite
        return SchedulerSide(
            placement=self.placement,
            lookups=LookupService(stores, timeout_s=LOOKUP_TIMEOUT_S),
            store_of=self.store_name,
            adapter_key=AdapterKeys(),
            workers=self.vllm_config.parallel_config.world_size,
            loads=transfer.is_kv_consumer and not lite,
            saves=transfer.is_kv_producer and not lite,
            persist_token_threshold=self.settings.persist_token_threshold,
        )

    def worker_side(
        self, kv_caches: dict[str, torch.Tensor], pp_rank: int, tp_rank: int
    ) -> WorkerSide:
        """Moves the bytes of one rank. ``kv_caches``: vLLM's layer name -> tensor; kept alive by vLLM."""
        names = self._layers_in_order(kv_caches, pp_rank)
        tensors = [kv_caches[name] for name in names]
        stride = self.check_tensors(tensors)
        bases = np.array([t.data_ptr() for t in tensors], dtype=np.uint64)
        lanes: list[Lane] = []
        for at in self.placement.of_rank(pp_rank, tp_rank):
            _, offset = self.placement.run(at.coordinate)
            geometry = self.geometry(at.coordinate)
            lanes.append(
                Lane(
                    store=self.store(at),
                    seed=at.seed,
                    pages=PageMap(
                        self.placement.grid,
                        bases,
                        stride,
                        self.placement.page().token_stride,
                        offset,
                    ),
                    block_bytes=geometry.shard_bytes * geometry.shard_count,
                    replica=tp_rank % self.facts.replicas,
                    replicas=self.facts.replicas,
                )
            )
        return WorkerSide(lanes, timeout_s=self.settings.timeout_ms / 1000)

    def _layers_in_order(self, kv_caches: dict[str, torch.Tensor], pp_rank: int) -> Sequence[str]:
        """This rank's layer names by layer number; they must be exactly its pipeline stage."""
        from vllm.model_executor.models.utils import extract_layer_index

        names = self.kv_cache_config.kv_cache_groups[0].layer_names
        numbered = sorted((extract_layer_index(name), name) for name in names)
        first, last = self.facts.stages[pp_rank]
        if [number for number, _ in numbered] != list(range(first, last)):
            raise UnsupportedError(
                f"pipeline stage {pp_rank} should hold layers {first}..{last - 1}, one KV cache each; "
                f"vLLM registered {[name for _, name in numbered]}"
            )
        missing = [name for _, name in numbered if name not in kv_caches]
        if missing:
            raise UnsupportedError(f"vLLM registered no KV cache for layers {missing}")
        return [name for _, name in numbered]

    def check_tensors(self, tensors: Sequence[torch.Tensor]) -> int:
        """Compare the real tensors with what the configuration promised; returns the block stride.

        vLLM checks nothing that a connector writes, so a surprise here is refused.
        """
        page = self.placement.page()
        blocks = self.kv_cache_config.num_blocks
        strides: set[int] = set()
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise UnsupportedError(f"the KV cache is on {tensor.device}, not in host memory")
            ratio, rest = divmod(tensor.shape[0], blocks)
            size = tensor.element_size()
            byte_strides = [stride * size for stride in tensor.stride()]
            rows = tensor.shape[2] if tensor.dim() == 4 else 0
            found = (
                tensor.dim(),
                rest,
                tensor.shape[1],
                ratio * rows,
                tensor.shape[-1] * size,
            )
            wanted = (4, 0, page.heads, page.tokens, page.cell_bytes)
            split_ok = ratio == 1 or (page.heads == 1 and not self.facts.opaque)
            inner_ok = byte_strides[-1] == size and byte_strides[2] == page.token_stride
            heads_ok = page.heads == 1 or byte_strides[1] == page.head_stride
            if found != wanted or not (split_ok and inner_ok and heads_ok):
                raise UnsupportedError(
                    f"a KV cache tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} for "
                    f"{blocks} blocks does not match {page}"
                )
            strides.add(byte_strides[0] * ratio)
        if len(strides) != 1:
            raise UnsupportedError(f"layers differ in block stride ({sorted(strides)} bytes)")
        return strides.pop()

    def close(self) -> None:
        """Close every store. Bounded and idempotent."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()
