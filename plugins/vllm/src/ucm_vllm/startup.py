"""Start: read the configuration, choose what was left open, say so, and warn about what disappoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm_core.adapter.retention import RetentionChoice
from ucm_core.config.load import load_config
from ucm_core.config.model import UcmConfig
from ucm_core.config.units import format_size
from ucm_core.identity import Manifest
from ucm_core.plugins import PluginHost
from ucm_core.registry import Role, StageContext
from ucm_core.store.contract import BlockStore, Geometry
from ucm_core.store.pipeline import open_store
from ucm_vllm.deployment import Deployment, Settings
from ucm_vllm.devices import HOST, KvDevice

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger("ucm.vllm")

#: Loggers whose lines belong in vLLM's log.
_OURS = ("ucm", "ucm_core")


def open_deployment(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: str
) -> Deployment:
    """Configuration -> deployment. ``role``: "scheduler" or "worker".

    Raises with every reason listed when something is wrong or not supported, before any store,
    thread or buffer exists.
    """
    adopt_logging()
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    host = PluginHost().load()
    config = load_config(transfer.kv_connector_extra_config, host=host)
    opener = _Opener(host, config, "scheduler" if role == "scheduler" else "worker", vllm_config)
    deployment = Deployment(vllm_config, kv_cache_config, settings(config, host), opener.open)
    if role == "scheduler":
        report(deployment, config, host)
    return deployment


def settings(config: UcmConfig, host: PluginHost) -> Settings:
    """The adapter's part of a configuration."""
    core = config.core
    roots: list[Path] = []
    for options in config.stages.values():
        roots += getattr(options, "storage_backends", ())
    return Settings(
        roots=tuple(roots),
        namespace=core.namespace,
        block_tokens=core.block_tokens,
        head_slices=core.head_slices,
        model_id=core.model_id,
        timeout_ms=config.store.timeout_ms,
        persist_token_threshold=core.persist_token_threshold,
        use_lite=core.use_lite,
        event_sync=core.enable_event_sync,
        use_layerwise=core.use_layerwise,
        layerwise_look_ahead=core.layerwise_look_ahead,
        recompute_tail_tokens=core.recompute_tail_tokens,
        retention=RetentionChoice.of(core, host),
        tiers=config.pipeline.stages,
    )


class _Opener:
    """Opens pipelines for one process of a deployment."""

    def __init__(
        self, host: PluginHost, config: UcmConfig, role: Role, vllm_config: VllmConfig
    ) -> None:
        self._host, self._config, self._role = host, config, role
        self._parallel = vllm_config.parallel_config

    def open(self, geometry: Geometry, manifest: Manifest, device: KvDevice = HOST) -> BlockStore:
        local_rank = 0 if self._role == "scheduler" else _local_rank()
        context = StageContext(
            geometry=geometry,
            namespace_dir_name=manifest.directory_name,
            namespace_digest=manifest.digest,
            role=self._role,
            local_rank=local_rank,
            local_rank_size=self._parallel.local_world_size,
            timeout_ms=self._config.store.timeout_ms,
            owner=f"vllm {self._role} {local_rank}",
            nodes=max(1, self._parallel.world_size // self._parallel.local_world_size),
        )
        return open_store(
            self._config.pipeline.name,
            stages=self._host.stages,
            pipelines=self._host.pipelines,
            stage_configs=self._config.stages,
            store_config=self._config.store,
            context=context,
            device=self._host.device(device.kind).open(device.index),
            event_sync=self._config.core.enable_event_sync,
        )


def _local_rank() -> int:
    from vllm.distributed.parallel_state import get_world_group

    return int(get_world_group().local_rank)


def report(deployment: Deployment, config: UcmConfig, host: PluginHost) -> None:
    """What an operator wants to see once, from the scheduler: choices, sizes, and warnings."""
    facts, manifest = deployment.facts, deployment.manifest
    rows = deployment.placement.table.chains
    states = deployment.placement.table.snapshots
    block = sum(row.shard_bytes * len(row.layers) for row in rows)
    lines = [
        f"UCM: pipeline {config.pipeline.name} ({config.pipeline.summary})",
        f"  configuration: {config.origin}",
        f"  directories: {', '.join(map(str, deployment.settings.roots)) or 'none'}",
        f"  namespace {manifest.name}: stored blocks of {manifest.block_tokens} tokens "
        f"({format_size(block)} each), {manifest.head_slices} head slice(s)",
        f"  model: {', '.join(f'{row.name} ({len(row.layers)} layers)' for row in rows)}; vLLM blocks "
        f"of {facts.alignment} tokens in {len(facts.tables)} group(s), tp {facts.tp} pp {len(facts.stages)}",
        *(
            f"  states: {row.name} ({len(row.layers)} layers, "
            f"{format_size(row.shard_bytes * len(row.layers))} each), at multiples of {row.block_tokens} "
            "tokens"
            for row in states
        ),
        f"  weights identity: {deployment.weights_source}",
        f"  {deployment.modes.summary()}",
    ]
    for entry in config.entries():
        if entry.source.startswith("chosen"):
            size = entry.key.endswith("_gb") and isinstance(entry.value, int)
            value = format_size(entry.value) if size else _shown(entry.value)
            lines.append(f"  {entry.key} = {value} ({entry.source})")
    _log.info("%s", "\n".join(lines))
    for warning in config.warnings:
        _log.warning("%s", warning)
    _warn_about_disappointments(deployment, config, host)


def _shown(value: Any) -> str:
    """A configured value in words; several directories as an operator writes them."""
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _warn_about_disappointments(
    deployment: Deployment, config: UcmConfig, host: PluginHost
) -> None:
    if not any(host.stage(name).persistent for name in config.pipeline.stages):
        _log.warning(
            "pipeline %s keeps nothing: no later process will find what this one computed. Choose one "
            "that ends in a persistent stage, such as Posix",
            config.pipeline.name,
        )
    if deployment.settings.use_lite:
        _log.warning("use_lite is set: requests are looked up, nothing is loaded or saved")
    transfer = deployment.vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy == "fail":
        _log.warning(
            'kv_load_failure_policy is "fail" (vLLM\'s default): a stored block that cannot be loaded '
            'ends its request with an error. Recommended: "kv_load_failure_policy":"recompute" in '
            "--kv-transfer-config"
        )
    interval = deployment.vllm_config.cache_config.prefix_cache_retention_interval
    if deployment.facts.states and interval == 0:
        _log.warning(
            "prefix_cache_retention_interval is 0 (vLLM's default): of a prompt vLLM keeps, and UCM can "
            "store, the recurrent state at its last boundary alone, so a prompt that shares only a part of "
            "it computes everything. Start vLLM with --prefix-cache-retention-interval 1024, or another "
            "multiple of its block of %d tokens",
            deployment.facts.alignment,
        )
    chosen = config.core.retention_interval
    if deployment.facts.states and chosen and interval and chosen % interval:
        _log.warning(
            "retention_interval is %d tokens, vLLM's prefix_cache_retention_interval %d: only states at "
            "multiples of both exist and are kept; make the first a multiple of the second",
            chosen,
            interval,
        )
    for warning in deployment.placement.table.warnings:
        _log.warning("%s", warning)


def adopt_logging() -> None:
    """Our lines go where vLLM's go, unless the operator has given our loggers handlers of their own."""
    theirs = logging.getLogger("vllm")
    for name in _OURS:
        ours = logging.getLogger(name)
        if theirs.handlers and not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = theirs.propagate
