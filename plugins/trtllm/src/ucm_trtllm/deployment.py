"""From the engine's arguments and our configuration to the two sides of one process.

The engine builds scheduler and worker at the same time, from the same arguments, and tells only the worker
where its memory lies. So both meet here: ``meet`` gives both the same object.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucm_core import _native
from ucm_core.config.load import load_config
from ucm_core.config.model import UcmConfig
from ucm_core.config.units import format_size
from ucm_core.errors import UnsupportedError
from ucm_core.identity import DEFAULT_BLOCK_TOKENS
from ucm_core.identity.choose import choose_namespace
from ucm_core.identity.manifest import Manifest
from ucm_core.plugins import PluginHost
from ucm_core.registry import StageContext
from ucm_core.store.contract import Geometry
from ucm_core.store.native_store import NativeBlockStore
from ucm_core.store.pipeline import open_store
from ucm_trtllm.arena import Arena
from ucm_trtllm.facts import Facts, kv_shape, read_facts
from ucm_trtllm.identity import identity_of, kv_type
from ucm_trtllm.pages import fitting_block_tokens, is_shared, object_layout, page_grid
from ucm_trtllm.placement import Model, Placement
from ucm_trtllm.pools import Pool
from ucm_trtllm.staging import Stager

_log = logging.getLogger("ucm.trtllm")


@dataclass(slots=True)
class Deployment:
    """One process's part. ``register`` completes it; until then nothing is promised. Owns its stores."""

    llm_args: Any
    facts: Facts
    config: UcmConfig
    host: PluginHost
    placement: Placement | None = None
    pool: Pool | None = None
    stager: Stager | None = None
    arena: Arena | None = None
    device: Any = None
    manifest: Manifest | None = None
    dumps: dict[str, NativeBlockStore] = field(default_factory=dict)
    reads: dict[str, NativeBlockStore] = field(default_factory=dict)

    @classmethod
    def read(cls, llm_args: Any, rank: int) -> Deployment:
        """Raises with every reason listed when something is wrong; opens nothing."""
        facts = read_facts(llm_args, rank)
        host = PluginHost().load()
        return cls(llm_args, facts, load_config(host=host), host)

    def register(self, pool: Pool) -> None:
        """The worker's memory is known: open namespace and stores. Raises what a start can be refused
        for, with the reason."""
        if self.placement is not None:
            raise UnsupportedError("KV caches were registered twice for one worker")
        facts, core = self.facts, self.config.core
        if facts.window_option is not None and pool.tokens is None:
            raise UnsupportedError(
                "kv_cache_config.max_attention_window with one pool tensor: the engine does not say which "
                "blocks a window has left behind; set kv_cache_config.use_kv_cache_manager_v2"
            )
        dtype = kv_type(facts, pool.dtype)
        model = Model.read(pool, kv_shape(facts.config), dtype, facts.tp)
        self.manifest = self._namespace(model)
        identity, source = identity_of(facts, dtype, core.model_id)
        grid = page_grid(model.page, self.manifest.block_tokens)
        layout = object_layout(model.page, grid, 1, 2)
        if not is_shared(layout):
            identity = identity.with_extra(layout=str(layout))
        placement = Placement.build(model, facts.tp, identity, self.manifest)
        self.device = self.host.device(pool.device[0]).open(pool.device[1])
        self.pool = pool
        try:
            for place, at in placement.of_rank(facts.tp_rank):
                name = placement.store_name(place, at)
                if name not in self.dumps:
                    self.dumps[name] = self._open(placement.geometry(place, at), self.device)
            if facts.schedules:
                self._open_scheduler(placement)
        except BaseException:
            self.close()
            raise
        self.placement = placement
        if facts.schedules:
            self._report(placement, source)

    def _open_scheduler(self, placement: Placement) -> None:
        core = self.config.core
        row_bytes = []
        for place in placement.places:
            total = 0
            for at in placement.keys.of(place.row.name):
                shape = placement.packed(place, at)
                total += shape.shard_count * shape.shard_bytes
                name = placement.store_name(place, at)
                if name not in self.reads:
                    self.reads[name] = self._open(shape, _native.host_device())
            row_bytes.append(total)
        self.arena = Arena.create(core.promise_buffer_gb, placement.tp, tuple(row_bytes))
        assert self.pool is not None
        self.stager = Stager(
            placement,
            self.reads,
            self.arena,
            wait_s=core.promise_wait_ms / 1000,
            whole=self.pool.whole_prompts,
        )

    def _namespace(self, model: Model) -> Manifest:
        core = self.config.core
        roots: list[Path] = []
        for options in self.config.stages.values():
            roots += getattr(options, "storage_backends", ())
        page = model.page
        tokens = fitting_block_tokens(page, DEFAULT_BLOCK_TOKENS, whole=model.has_sides)
        return choose_namespace(
            roots,
            core.namespace,
            block_tokens=core.block_tokens,
            head_slices=core.head_slices,
            fitting_tokens=tokens,
            fitting_slices=1 if model.shape.latent else min(self.facts.tp, model.shape.heads),
        )

    def _open(self, geometry: Geometry, device: Any) -> NativeBlockStore:
        assert self.manifest is not None
        facts = self.facts
        context = StageContext(
            geometry=geometry,
            namespace_dir_name=self.manifest.directory_name,
            namespace_digest=self.manifest.digest,
            role="worker",
            local_rank=facts.rank,
            local_rank_size=max(1, facts.tp),
            timeout_ms=self.config.store.timeout_ms,
            owner=f"trtllm rank {facts.rank}",
        )
        return open_store(
            self.config.pipeline.name,
            stages=self.host.stages,
            pipelines=self.host.pipelines,
            stage_configs=self.config.stages,
            store_config=self.config.store,
            context=context,
            device=device,
            event_sync=self.config.core.enable_event_sync,
        )

    def _report(self, placement: Placement, weights: str) -> None:
        """What an operator wants to see once."""
        manifest, arena = self.manifest, self.arena
        assert manifest is not None and arena is not None
        rows = ", ".join(f"{p.row.name} ({len(p.row.layers)} layers)" for p in placement.places)
        _log.info(
            "UCM: pipeline %s; configuration %s; namespace %s: stored blocks of %d tokens, %d head slice(s); "
            "rows %s; engine blocks of %d tokens, tp %d; weights identity: %s; at most %s verified in "
            "host memory, a query waits at most %d ms",
            self.config.pipeline.name,
            self.config.origin,
            manifest.name,
            manifest.block_tokens,
            manifest.head_slices,
            rows,
            placement.alignment,
            placement.tp,
            weights,
            format_size(len(arena.whole)),
            self.config.core.promise_wait_ms,
        )
        for warning in self.config.warnings:
            _log.warning("%s", warning)
        if not self.facts.block_reuse:
            _log.warning(
                "kv_cache_config.enable_block_reuse is off: the engine takes no hits then; switch it on"
            )

    def close(self) -> None:
        """Close every store. Bounded and idempotent."""
        if self.stager is not None:
            self.stager.close()
            self.stager = None
        for store in (*self.dumps.values(), *self.reads.values()):
            store.close()
        self.dumps.clear()
        self.reads.clear()


@dataclass(slots=True)
class _Meeting:
    """Deployments of this process, by engine arguments and rank; an entry holds its arguments alive, so
    that their identity is not given to others."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    known: dict[tuple[int, int], Deployment] = field(default_factory=dict)
    seats: dict[tuple[int, int], set[str]] = field(default_factory=dict)


_meeting = _Meeting()


def meet(llm_args: Any, rank: int, side: str) -> Deployment:
    """The deployment of these arguments and rank: made by whichever side comes first. A side that comes a
    second time (the engine is built anew from the same arguments) gets a new one."""
    key = (id(llm_args), rank)
    with _meeting.lock:
        deployment = _meeting.known.get(key)
        if deployment is None or side in _meeting.seats[key]:
            deployment = Deployment.read(llm_args, rank)
            _meeting.known[key], _meeting.seats[key] = deployment, set()
        _meeting.seats[key].add(side)
        return deployment


def forget(deployments: Sequence[Deployment]) -> None:
    """Close these and let go of their engines' arguments."""
    with _meeting.lock:
        for key, known in list(_meeting.known.items()):
            if any(known is one for one in deployments):
                del _meeting.known[key], _meeting.seats[key]
    for deployment in deployments:
        deployment.close()


@atexit.register
def _close_all() -> None:
    forget(list(_meeting.known.values()))
