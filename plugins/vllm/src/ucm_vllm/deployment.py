"""From vLLM's configuration and ours to the two sides: coordinates, seeds, geometries, stores.

``Deployment`` is the same object in the scheduler and in every worker; each builds its side from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ucm_core.adapter.blocks import PageMap, PieceRuns
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.adapter.retention import RetentionChoice
from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.errors import UnsupportedError
from ucm_core.identity import DEFAULT_BLOCK_TOKENS, Manifest, choose_namespace
from ucm_core.spec import TARGET, SeededCoordinate
from ucm_core.store.contract import BlockStore, Geometry, RunShape
from ucm_vllm.devices import HOST, KvDevice
from ucm_vllm.events import KvEvents
from ucm_vllm.facts import Facts, layer_number, read_facts
from ucm_vllm.identity import AdapterKeys, find_weights, kv_dtype, model_identity
from ucm_vllm.lanes import Lane
from ucm_vllm.lookup import LookupService
from ucm_vllm.modes import Choice, Modes, check_modes, choose_modes, drafts_of
from ucm_vllm.page_layout import fitting_block_tokens, is_shared, object_layout, page_grid
from ucm_vllm.placement import Placement, RowPlace, StatePlace
from ucm_vllm.scheduler import SchedulerSide
from ucm_vllm.states import check_state_tensors
from ucm_vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger("ucm.vllm")

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
    event_sync: bool = True
    use_layerwise: Choice = "auto"
    layerwise_look_ahead: int | None = None
    recompute_tail_tokens: int | None = None
    retention: RetentionChoice = field(default_factory=RetentionChoice)
    #: Stages of the pipeline, top to bottom.
    tiers: tuple[str, ...] = ()


class OpenStore(Protocol):
    """Opens one pipeline bound to one geometry of the namespace, for this process and a rank's device."""

    def __call__(
        self, geometry: Geometry, manifest: Manifest, device: KvDevice = ...
    ) -> BlockStore: ...


@dataclass(slots=True)
class Deployment:
    """Everything both sides derive alike. Owns the stores it opened: call :meth:`close`."""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    settings: Settings
    open_store: OpenStore
    facts: Facts = field(init=False)
    modes: Modes = field(init=False)
    manifest: Manifest = field(init=False)
    placement: Placement = field(init=False)
    weights_source: str = field(init=False)
    device: KvDevice = field(init=False, default=HOST)
    _stores: dict[str, BlockStore] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = read_facts(self.vllm_config, self.kv_cache_config)
        self.modes = choose_modes(
            self.settings.use_layerwise,
            self.settings.layerwise_look_ahead,
            tail=self.settings.recompute_tail_tokens,
            drafts=drafts_of(self.vllm_config),
        )
        check_modes(self.modes, self.facts, self.vllm_config)
        self.manifest = self._namespace()
        weights = find_weights(self.vllm_config, self.settings.model_id)
        self.weights_source = weights.source
        dtype = kv_dtype(self.facts)
        identity = model_identity(self.vllm_config, self.facts, weights)
        # The bytes are stored as this engine lays them out, and readers convert them: the id excludes
        # the layout. An order that does not convert to every other one is part of the id: a clean miss
        # instead of a load that always fails.
        private = dict.fromkeys(str(x) for x in self._layouts(dtype) if not is_shared(x))
        if private:
            identity = identity.with_extra(layout=" ".join(private))
        self.placement = Placement.build(
            self.facts, identity, self.manifest, dtype, self.settings.retention
        )

    def _layouts(self, dtype: str) -> Iterator[LayoutDescriptor]:
        """How one layer of each kind lies in an object."""
        for kind in self.facts.kinds:
            grid = page_grid(kind, self.manifest.block_tokens)
            heads = max(1, kind.total_heads // self.manifest.head_slices)
            order = self.facts.physical_order
            yield object_layout(kind, order, grid, dtype, layers=1, heads=heads)
        for state in self.facts.states:
            yield state.layout(layers=1)

    def _namespace(self) -> Manifest:
        """Open the namespace, or choose one that fits when the operator named none."""
        settings, facts = self.settings, self.facts
        return choose_namespace(
            settings.roots,
            settings.namespace,
            block_tokens=settings.block_tokens,
            head_slices=settings.head_slices,
            fitting_tokens=fitting_block_tokens(facts, DEFAULT_BLOCK_TOKENS),
            fitting_slices=facts.shards,
        )

    # -- coordinates, geometry, stores -------------------------------------------------------------

    def geometry(self, at: SeededCoordinate) -> Geometry:
        """One shard per layer; a shard is the coordinate's heads of every piece of a stored block, or a
        whole state."""
        state = self.placement.state_place(at.row)
        if state is not None:
            return Geometry(
                shard_count=len(at.coordinate.layers),
                shard_bytes=state.kind.nbytes,
                runs_per_shard=1,
                run=RunShape(state.kind.nbytes),
                layout=str(self.placement.layout(at)),
            )
        runs = self.placement.runs(at)
        pieces = self.placement.place(at.row).grid.pieces
        return Geometry(
            shard_count=len(at.coordinate.layers),
            shard_bytes=pieces * runs.nbytes,
            runs_per_shard=pieces * runs.count,
            run=runs.shapes[0],
            layout=str(self.placement.layout(at)),
            more_runs=runs.shapes[1:],
        )

    def store_name(self, at: SeededCoordinate) -> str:
        """Which store holds a coordinate: objects of one shape share one."""
        return f"{at.row.store}/{len(at.coordinate.layers)}"

    def store(self, at: SeededCoordinate) -> BlockStore:
        """The store of a coordinate; opened on first use."""
        name = self.store_name(at)
        if name not in self._stores:
            self._stores[name] = self.open_store(self.geometry(at), self.manifest, self.device)
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
            modes=self.modes,
            loads=transfer.is_kv_consumer and not lite,
            saves=transfer.is_kv_producer and not lite,
            persist_token_threshold=self.settings.persist_token_threshold,
            prefetches=len(self.settings.tiers) > 1,
            events=KvEvents.wanted(self.vllm_config, self.kv_cache_config, self.placement.rows),
            retention=self.settings.retention.policy,
        )

    def worker_side(
        self, kv_caches: dict[str, torch.Tensor], pp_rank: int, tp_rank: int
    ) -> WorkerSide:
        """Moves the bytes of one rank. ``kv_caches``: vLLM's layer name -> tensor; kept alive by vLLM."""
        names, states = self._layer_names(kv_caches, pp_rank)
        self.device = KvDevice.of([kv_caches[n] for n in (*names.values(), *states.values())])
        lanes = []
        for at in self.placement.of_rank(pp_rank, tp_rank):
            place = self.placement.state_place(at.row)
            of = names if place is None else states
            tensors = [kv_caches[of[layer]] for layer in at.coordinate.layers]
            lanes.append(
                self._lane(at, tensors, tp_rank)
                if place is None
                else self._state_lane(at, tensors, place)
            )
        return WorkerSide(
            lanes,
            timeout_s=self.settings.timeout_ms / 1000,
            modes=self.modes,
            units=self._units(pp_rank),
            keys={name: LayerKey(TARGET, number) for number, name in names.items()},
            by_pages=self.facts.continues_anywhere,
            mark=self.device.mark(self.settings.event_sync),
        )

    def _units(self, pp_rank: int) -> UnitMap:
        """vLLM calls for attention layers alone, and a state is complete only when the pass is over."""
        table = self.placement.table
        stage = {TARGET: range(*self.facts.stages[pp_rank])}
        return UnitMap(table, stage, apart=[row.name for row in table.snapshots])

    def _lane(self, at: SeededCoordinate, tensors: Sequence[torch.Tensor], tp_rank: int) -> Lane:
        """``tensors``: those of the coordinate's layers, in its order."""
        place, geometry = self.placement.place(at.row), self.geometry(at)
        pages = PageMap(
            grid=place.grid,
            bases=np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64),
            block_stride=self.check_tensors(tensors, place),
            runs=self.placement.runs(at),
            tables=place.columns(at.coordinate.layers),
        )
        return Lane(
            row=place.index,
            row_name=at.row.name,
            store=self.store(at),
            seed=at.seed,
            pages=pages,
            block_bytes=geometry.shard_bytes * geometry.shard_count,
            replica=tp_rank % place.kind.replicas,
            replicas=place.kind.replicas,
            windowed=at.row.window is not None,
        )

    def _state_lane(
        self, at: SeededCoordinate, tensors: Sequence[torch.Tensor], place: StatePlace
    ) -> Lane:
        """States lie at the start of their block in each layer's tensor."""
        blocks = self.kv_cache_config.num_blocks
        pages = PageMap(
            grid=place.grid,
            bases=np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64),
            block_stride=check_state_tensors(tensors, place.kind, blocks),
            runs=PieceRuns.single(RunShape(place.kind.nbytes), 0, 0),
            tables=place.columns(at.coordinate.layers),
        )
        return Lane(
            row=place.index,
            row_name=at.row.name,
            store=self.store(at),
            seed=at.seed,
            pages=pages,
            block_bytes=place.kind.nbytes * len(tensors),
            windowed=True,
            snapshot=True,
        )

    def _layer_names(
        self, kv_caches: dict[str, torch.Tensor], pp_rank: int
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Layer number -> vLLM's name, of this rank's layers with KV (exactly its pipeline stage) and of
        those with states."""
        groups = self.kv_cache_config.kv_cache_groups
        names: dict[int, str] = {}
        states: dict[int, str] = {}
        for group, kind in zip(groups, self.facts.tables, strict=True):
            of, layers = (states if kind is None else names), len(self.facts.kind_of)
            for name in group.layer_names:
                of[layer_number(name, layers, state=kind is None)] = name
        first, last = self.facts.stages[pp_rank]
        kept = (self.facts.kind_of, self.facts.state_kind_of)
        wanted = [{i for i in range(first, last) if of and of[i] is not None} for of in kept]
        found = len(names) + len(states)
        if [set(names), set(states)] != wanted or found != sum(len(g.layer_names) for g in groups):
            raise UnsupportedError(
                f"pipeline stage {pp_rank} should hold KV of layers {sorted(wanted[0])} and states of "
                f"{sorted(wanted[1])}, one cache each; vLLM registered "
                f"{sorted(n for group in groups for n in group.layer_names)}"
            )
        every = (*names.values(), *states.values())
        missing = [name for name in every if name not in kv_caches]
        if missing:
            raise UnsupportedError(f"vLLM registered no KV cache for layers {missing}")
        return names, states

    def check_tensors(self, tensors: Sequence[torch.Tensor], place: RowPlace) -> int:
        """Compare the real tensors with what the configuration promised; returns the block stride.

        vLLM checks nothing that a connector writes, so a surprise here is refused.
        """
        page = self.placement.page(place.row)
        blocks = self.kv_cache_config.num_blocks
        strides: set[int] = set()
        for tensor in tensors:
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
            split_ok = ratio == 1 or (page.heads == 1 and not page.opaque)
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
