"""From a configuration to a cache: namespace, identity, stores, and the two sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.adapter.retention import RetentionChoice
from ucm_core.config.load import load_config
from ucm_core.config.model import UcmConfig
from ucm_core.coordinator import Coordinator
from ucm_core.identity import Manifest, open_namespace
from ucm_core.plugins import PluginHost
from ucm_core.registry import Role, StageContext
from ucm_core.spec import Kind, SeededCoordinate
from ucm_core.store.contract import BlockStore
from ucm_core.store.pipeline import open_store
from ucm_core.store.snapshot import SnapshotStore
from ucm_reference.cache.messages import StatePart
from ucm_reference.cache.modes import Modes
from ucm_reference.cache.placement import Placement
from ucm_reference.cache.scheduler import SchedulerSide
from ucm_reference.cache.table import model_identity, spec_table
from ucm_reference.cache.worker import Worker
from ucm_reference.memory import Sizes
from ucm_reference.model import Model
from ucm_reference.topology import Rank, Topology

#: Tokens of a stored block where the configuration names none.
BLOCK_TOKENS = 128


@dataclass(slots=True)
class Deployment:
    """One process's stores and what is made from them. Owns the stores: call :meth:`close`.

    Ranks that share the process share the stores (all calls are thread-safe).
    """

    model: Model
    topology: Topology
    config: UcmConfig
    placement: Placement
    modes: Modes
    retention: RetentionChoice
    stores: dict[str, BlockStore]
    states: dict[str, SnapshotStore] = field(default_factory=dict)

    def scheduler_side(self, kind: type[SchedulerSide] = SchedulerSide) -> SchedulerSide:
        """One per deployment, beside the engine's scheduler. ``kind``: another one, for comparisons."""
        coordinator = Coordinator(
            self.placement.keys, policy=self.retention.policy, alignment=self.model.alignment
        )
        ranks = len(self.topology.ranks())
        return kind(self.placement, coordinator, self.stores, self.states, ranks, self.modes)

    def worker(self, rank: Rank) -> Worker:
        """The connector of one rank; where it lies is told by ``register``."""
        timeout_s = self.config.store.timeout_ms / 1000
        return Worker(self.placement, self.stores, self.states, state_ids, timeout_s, self.modes)

    def close(self) -> None:
        """Close every store. Bounded and idempotent."""
        for store in self.stores.values():
            store.close()
        self.stores.clear()
        self.states.clear()


def state_ids(at: SeededCoordinate, state: StatePart) -> npt.NDArray[np.uint8]:
    """``uint8[1, 16]``: the id of a state's object at one coordinate."""
    ids = np.empty((1, 16), np.uint8)
    link = np.frombuffer(state.link, np.uint8).reshape(1, 32)
    _native.hash.snapshot_ids(at.seed, link, np.array([state.position], np.uint64), ids)
    return ids


def open_deployment(
    model: Model,
    topology: Topology,
    sizes: Sizes,
    options: Mapping[str, Any] | None = None,
    *,
    role: Role = "worker",
) -> Deployment:
    """Read the configuration (inline ``options``, as every adapter takes them), open the namespace and
    the stores. Raises ConfigError with every problem listed, before a store exists."""
    host = PluginHost().load()
    config = load_config(options, host=host)
    manifest = _namespace(config, topology)
    retention = RetentionChoice.of(config.core, host)
    table = spec_table(model, manifest.block_tokens, retention)
    placement = Placement.build(
        model, topology, sizes, table, model_identity(model), manifest.head_slices
    )
    modes = Modes.of(config.core, table)
    deployment = Deployment(model, topology, config, placement, modes, retention, {})
    try:
        for at in placement.everything():
            name = placement.store_name(at)
            if name in deployment.stores:
                continue
            store = _open(host, config, manifest, placement, at, role)
            deployment.stores[name] = store
            if at.row.kind is Kind.SNAPSHOT:
                deployment.states[name] = SnapshotStore(store)
    except BaseException:
        deployment.close()
        raise
    return deployment


def _namespace(config: UcmConfig, topology: Topology) -> Manifest:
    """The configured namespace; without directories there is nowhere to keep a manifest."""
    core = config.core
    tokens = core.block_tokens or BLOCK_TOKENS
    slices = core.head_slices or topology.tp
    name = core.namespace or f"reference-b{tokens}-h{slices}"
    roots: list[Path] = []
    for options in config.stages.values():
        roots += getattr(options, "storage_backends", ())
    if not roots:
        return Manifest(name, tokens, slices)
    return open_namespace(
        roots,
        name,
        block_tokens=core.block_tokens,
        head_slices=core.head_slices,
        first_block_tokens=tokens,
        first_head_slices=slices,
    )


def _open(
    host: PluginHost,
    config: UcmConfig,
    manifest: Manifest,
    placement: Placement,
    at: SeededCoordinate,
    role: Role,
) -> BlockStore:
    context = StageContext(
        geometry=placement.geometry(at),
        namespace_dir_name=manifest.directory_name,
        namespace_digest=manifest.digest,
        role=role,
        timeout_ms=config.store.timeout_ms,
        owner=f"reference {role} {at.row.name}",
    )
    return open_store(
        config.pipeline.name,
        stages=host.stages,
        pipelines=host.pipelines,
        stage_configs=config.stages,
        store_config=config.store,
        context=context,
    )
