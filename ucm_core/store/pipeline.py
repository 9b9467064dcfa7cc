"""Build the store of a pipeline: its stages bottom to top, the host tier, the native store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ucm_core import _native
from ucm_core.config.reference import PIPELINE_HINTS
from ucm_core.config.units import format_size
from ucm_core.errors import ConfigError
from ucm_core.names import nearest
from ucm_core.registry import PipelineSpec, StageContext, StageSpec
from ucm_core.store.config import StoreConfig
from ucm_core.store.native_store import NativeBlockStore, native_geometry

#: Of the staging buffers, the part that only loads may take.
_LOAD_RESERVE_DIVISOR = 4
_MIN_STAGING_OBJECTS = 2
_MAX_STAGING_OBJECTS = 4096


def open_store(
    pipeline_name: str,
    *,
    stages: Mapping[str, StageSpec],
    pipelines: Mapping[str, PipelineSpec],
    stage_configs: Mapping[str, BaseModel],
    store_config: StoreConfig,
    context: StageContext,
    device: _native.Device | None = None,
    event_sync: bool = True,
) -> NativeBlockStore:
    """Set up a pipeline: from here on threads, rings and mappings exist, owned by this process.

    ``pipelines`` maps names and aliases; ``stage_configs`` holds the validated options by stage name
    (a stage without an entry gets its defaults). Role ``scheduler`` gets a store without buffers that
    looks up, touches and prefetches. ``device`` is where the addresses of tasks lie (None: host memory); the
    host buffers are pinned for it. ``event_sync`` False: a dump without an event waits for the whole device.
    Raises ``ConfigError`` for names and sizes, and what a stage's
    factory raises; whatever was built by then is shut down.
    """
    spec = _pipeline(pipeline_name, pipelines)
    below: Any = None
    tier: Any = None
    built: list[Any] = []
    try:
        for name in reversed(spec.stages):
            if tier is not None:
                raise ConfigError(
                    f"pipeline '{spec.name}': stage '{name}' stands above the host memory of "
                    f"'{tier.name}', which must be the topmost stage"
                )
            stage = _build(spec, name, stages, stage_configs, context, below)
            if stage is None:
                continue
            if isinstance(stage, _native.HostTier):
                tier = stage
            else:
                built.append(stage)
                below = _guarded(stage, stages[name], store_config, context)
                built[-1] = below
        if below is None:
            raise ConfigError(f"pipeline '{spec.name}': no storage stage below the host memory")
        return NativeBlockStore(
            _store(below, tier, store_config, context, device, event_sync), context.geometry
        )
    except BaseException:
        for stage in reversed(built):
            stage.shutdown(timeout_s=1.0)
        raise


def staging_objects(budget_bytes: int, object_bytes: int) -> tuple[int, int]:
    """(buffers only loads may take, buffers for all) from the budget of ``staging_buffer_gb``."""
    total = min(budget_bytes // object_bytes, _MAX_STAGING_OBJECTS)
    if total < _MIN_STAGING_OBJECTS:
        raise ConfigError(
            f"staging_buffer_gb is {format_size(budget_bytes)}; one object of this model is "
            f"{format_size(object_bytes)} and at least {_MIN_STAGING_OBJECTS} are needed: set "
            f"{format_size(_MIN_STAGING_OBJECTS * object_bytes)} or more"
        )
    reserve = max(1, total // _LOAD_RESERVE_DIVISOR)
    return reserve, total - reserve


def _pipeline(name: str, pipelines: Mapping[str, PipelineSpec]) -> PipelineSpec:
    spec = pipelines.get(name)
    if spec is not None:
        return spec
    known = ", ".join(sorted(pipelines)) or "none"
    if name in PIPELINE_HINTS:
        raise ConfigError(f"pipeline '{name}' {PIPELINE_HINTS[name]}; known: {known}")
    raise ConfigError(f"unknown pipeline '{name}'{nearest(name, pipelines)}; known: {known}")


def _build(
    spec: PipelineSpec,
    name: str,
    stages: Mapping[str, StageSpec],
    stage_configs: Mapping[str, BaseModel],
    context: StageContext,
    below: Any,
) -> Any:
    stage = stages.get(name)
    if stage is None:
        known = ", ".join(sorted(stages)) or "none"
        raise ConfigError(
            f"pipeline '{spec.name}': unknown stage '{name}'{nearest(name, stages)}; known: {known}"
        )
    if stage.needs_below and below is None:
        raise ConfigError(f"pipeline '{spec.name}': stage '{name}' needs another stage below it")
    config = stage_configs.get(name)
    if config is None:
        config = stage.config_model()
    return stage.build(context, config, below)


def _guarded(stage: Any, spec: StageSpec, config: StoreConfig, context: StageContext) -> Any:
    """The stage behind its health wrapper. Tools go without: they want the medium's own answers."""
    health = config.store_health
    if not (health.enabled and spec.guarded) or context.role == "tool":
        return stage
    return _native.guard_stage(
        stage,
        interval_ms=health.interval_ms,
        timeout_ms=health.timeout_ms,
        window=health.window,
        failures=health.failures,
    )


def _staging_tier(geometry: _native.Geometry, reserve: int, shared: int) -> _native.HostTier:
    """Buffers whose pages are all there when this returns: the first loads find them warm."""
    try:
        return _native.staging_tier(geometry, load_reserve=reserve, shared=shared)
    except MemoryError:
        needed = format_size((reserve + shared) * geometry.object_bytes)
        raise ConfigError(
            f"the machine does not give this process {needed} of staging buffers: set a smaller "
            "staging_buffer_gb, or free memory"
        ) from None


def _store(
    below: Any,
    tier: Any,
    config: StoreConfig,
    context: StageContext,
    device: _native.Device | None,
    event_sync: bool,
) -> _native.Store:
    geometry = native_geometry(context.geometry)
    if tier is None and context.role != "scheduler":
        reserve, shared = staging_objects(config.staging_buffer_gb, geometry.object_bytes)
        tier = _staging_tier(geometry, reserve, shared)
    return _native.Store(
        below,
        tier,
        timeout_ms=config.timeout_ms,
        waiting_depth=config.waiting_queue_depth,
        running_depth=config.running_queue_depth,
        copiers=config.copy_threads,
        write_retries=config.dump_retries,
        retry_delay_ms=20,
        open_age_ms=0,
        device=device,
        synchronize_dumps=not event_sync,
    )
