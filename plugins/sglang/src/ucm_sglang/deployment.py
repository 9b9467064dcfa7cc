"""From SGLang's pools and our configuration to lanes: shapes, identity, namespace, stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucm_core.config.load import load_config
from ucm_core.config.model import UcmConfig
from ucm_core.config.units import format_size
from ucm_core.errors import UnsupportedError
from ucm_core.identity import Manifest, choose_namespace
from ucm_core.plugins import PluginHost
from ucm_core.registry import StageContext
from ucm_core.store.contract import BlockStore, Geometry
from ucm_core.store.pipeline import open_store
from ucm_sglang.lane import PoolLane
from ucm_sglang.pool_shape import FP8, PoolShape, pool_problems, pool_shape
from ucm_sglang.rows import ANCHOR, PoolRow, pool_rows, ranks_of
from ucm_sglang.server import Server, read_server

_log = logging.getLogger("ucm.sglang")

#: Keys of the extra configuration that are SGLang's own.
SGLANG_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
#: SGLang owns a host cache, so ours is not the default here.
DEFAULT_PIPELINES = ("Posix",)


def read_options(extra_config: Mapping[str, Any] | None) -> tuple[UcmConfig, PluginHost]:
    """Our part of ``--hicache-storage-backend-extra-config``, or ``UCM_CONFIG_FILE``. Raises ConfigError
    with every problem."""
    host = PluginHost().load()
    config = load_config(
        extra_config, host=host, foreign_keys=SGLANG_KEYS, default_pipelines=DEFAULT_PIPELINES
    )
    return config, host


@dataclass(slots=True)
class Deployment:
    """What the pools of one rank are stored as. Owns the stores it opens: call :meth:`close`.

    ``pools``: SGLang's host pools by name, among them the anchor. Raises UnsupportedError with every
    reason when something cannot work, before any store, thread or buffer exists.
    """

    config: UcmConfig
    host: PluginHost
    storage_config: Any
    pools: Mapping[str, Any]
    server: Server = field(init=False)
    manifest: Manifest = field(init=False)
    weights_source: str = field(init=False)
    lanes: dict[str, PoolLane] = field(init=False, default_factory=dict)
    _stores: list[BlockStore] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.server, problems = read_server()
        problems += self._problems()
        if problems:
            raise UnsupportedError(
                "UCM cannot store this server's KV:\n"
                + "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
            )
        told = self.server.kv_cache_dtype
        shapes = {name: pool_shape(name, pool, told) for name, pool in self.pools.items()}
        rows = self._rows(shapes)
        try:
            for name, row in rows.items():
                self.lanes[name] = PoolLane(row, self._open(row))
        except BaseException:
            self.close()
            raise

    def _problems(self) -> list[str]:
        dtype, told = self.server.kv_cache_dtype, self.storage_config
        problems = [
            p for name, pool in self.pools.items() for p in pool_problems(name, pool, dtype)
        ]
        if ANCHOR not in self.pools:
            problems.append("SGLang registered no host pool of KV")
        if max(int(told.attn_cp_size), int(getattr(told, "dcp_size", 1))) > 1:
            problems.append("context parallelism splits pages, which is not supported; set it to 1")
        if len(self.pools) > 1 and int(told.pp_size) > 1:
            problems.append(
                "pipeline stages together with pools of windows or states are not supported; use "
                "tensor parallelism"
            )
        return problems

    def _rows(self, shapes: Mapping[str, PoolShape]) -> dict[str, PoolRow]:
        anchor, core = shapes[ANCHOR], self.config.core
        ranks = ranks_of(self.storage_config, self.pools[ANCHOR], self.server.layers)
        if core.block_tokens not in (None, anchor.tokens):
            raise UnsupportedError(
                f"block_tokens is {core.block_tokens}, but SGLang's page has {anchor.tokens} tokens, and "
                f"a stored block is a page; set --page-size {core.block_tokens}, or leave block_tokens out"
            )
        split = 1 if anchor.kind == "latent" else min(ranks.tp_size, self.server.kv_heads)
        self.manifest = choose_namespace(
            self.roots,
            core.namespace,
            block_tokens=anchor.tokens,
            head_slices=core.head_slices,
            fitting_slices=split,
        )
        weights = self.server.weights(core.model_id)
        self.weights_source = weights.source
        identity = self.server.identity(weights, anchor.dtype)
        if anchor.dtype in FP8:
            # Quantised by scales of SGLang's own choice: shared among SGLang servers alone.
            identity = identity.with_extra(engine_scales="sglang")
        return pool_rows(shapes, self.server, identity, self.manifest, ranks)

    @property
    def roots(self) -> tuple[Path, ...]:
        """Directories of the pipeline's stages."""
        found: list[Path] = []
        for options in self.config.stages.values():
            found += getattr(options, "storage_backends", ())
        return tuple(found)

    def _open(self, row: PoolRow) -> BlockStore:
        geometries: set[Geometry] = {held.cut.geometry for held in row.held}
        (geometry,) = geometries
        told = self.storage_config
        store = open_store(
            self.config.pipeline.name,
            stages=self.host.stages,
            pipelines=self.host.pipelines,
            stage_configs=self.config.stages,
            store_config=self.config.store,
            context=StageContext(
                geometry=geometry,
                namespace_dir_name=self.manifest.directory_name,
                namespace_digest=self.manifest.digest,
                role="worker",
                local_rank=int(told.tp_rank),
                local_rank_size=int(told.tp_size),
                timeout_ms=self.config.store.timeout_ms,
                owner=f"sglang {row.shape.name} {told.tp_rank}",
            ),
        )
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Finish or abandon what runs, join threads. Idempotent."""
        stores, self._stores = self._stores, []
        for store in stores:
            store.close()

    def report(self, warn: Callable[[str], None]) -> str:
        """What an operator wants to see once at start; ``warn`` gets what disappoints."""
        for warning in self.config.warnings:
            warn(warning)
        if not any(self.host.stage(name).persistent for name in self.config.pipeline.stages):
            warn(
                f"pipeline {self.config.pipeline.name} keeps nothing: no later process will find what "
                "this one computed. Choose one that ends in a persistent stage, such as Posix"
            )
        manifest = self.manifest
        pools = "; ".join(
            f"{name}: {lane.pool.shape.layers} layers, {format_size(lane.page_bytes)} a page, "
            f"{len(lane.pool.held)} object(s) of {lane.pool.row.name}"
            for name, lane in self.lanes.items()
        )
        return "\n".join(
            (
                f"UCM: pipeline {self.config.pipeline.name} ({self.config.pipeline.summary})",
                f"  configuration: {self.config.origin}",
                f"  directories: {', '.join(map(str, self.roots)) or 'none'}",
                f"  namespace {manifest.name}: pages of {manifest.block_tokens} tokens, "
                f"{manifest.head_slices} head slice(s)",
                f"  pools: {pools}",
                f"  weights identity: {self.weights_source}",
            )
        )
