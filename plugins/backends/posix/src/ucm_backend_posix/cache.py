"""The stage `Cache`: options, and the factory of the shared host memory."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from ucm_core import _native
from ucm_core.config.machine import Machine
from ucm_core.config.options import Chosen, Options
from ucm_core.config.units import GibAsBytes, SecondsAsMs, format_size
from ucm_core.errors import ConfigError
from ucm_core.registry import HostMemory, StageContext
from ucm_core.store.native_store import native_geometry

logger = logging.getLogger("ucm.cache")

SEGMENT_DIRECTORY = "/dev/shm"
#: Of the available memory, the part taken when the operator set nothing.
_DEFAULT_DIVISOR = 8


class CacheConfig(Options):
    """Host memory that all ranks of a node share, so that what one loaded the others find."""

    cache_buffer_capacity_gb: GibAsBytes = Field(
        0,
        ge=0,
        description="Host memory of the cache: for the whole node when shared, else per worker. "
        "Default: 1/8 of the available memory, at most half of the free space of /dev/shm.",
    )
    cache_when_short: Literal["refuse", "without"] = Field(
        "refuse",
        description="What to do when the memory is not there at start: refuse to start, or go on "
        "without the cache after one warning. Default: without, when cache_buffer_capacity_gb is not "
        "set.",
    )
    share_buffer_enable: bool = Field(
        True, description="One cache for all workers of the node instead of one per worker."
    )
    cache_load_exclusive_buffer_number: int | None = Field(
        None,
        ge=0,
        description="Buffers (of one shard each, rounded up to whole blocks) that only loads may "
        "take. Default: 1024, at most a quarter of the cache.",
    )
    local_rank_size: int | None = Field(
        None,
        gt=0,
        description="Workers of this node that share the cache. Default: told by the engine; who has "
        "attached decides, a contradiction is reported.",
    )
    cache_load_backend_only: bool = Field(
        False,
        description="Diagnosis: loads read from the stage below even what the cache holds, unless "
        "another load is using it.",
    )
    cache_quarantine_sec: SecondsAsMs = Field(
        60_000,
        description="How long memory into which a killed process was reading stays closed to other "
        "blocks: the kernel may still finish that read.",
    )

    @classmethod
    def choose(cls, given: Mapping[str, Any], machine: Machine) -> Mapping[str, Chosen]:
        if "cache_buffer_capacity_gb" in given:
            return {}
        available, free = machine.available_memory_bytes, machine.shm_free_bytes
        size = available // _DEFAULT_DIVISOR
        reason = f"1/{_DEFAULT_DIVISOR} of {format_size(available)} available"
        if given.get("share_buffer_enable", True) is not False and free // 2 < size:
            size, reason = free // 2, f"half of {format_size(free)} free in {SEGMENT_DIRECTORY}"
        chosen = {"cache_buffer_capacity_gb": Chosen(f"{max(size >> 20, 1)} MiB", reason)}
        if "cache_when_short" not in given:
            chosen["cache_when_short"] = Chosen("without", "the capacity is a default")
        return chosen


def host_memory(config: CacheConfig) -> HostMemory:
    """What the cache will allocate."""
    if config.share_buffer_enable:
        return HostMemory(per_node_bytes=config.cache_buffer_capacity_gb)
    return HostMemory(per_rank_bytes=config.cache_buffer_capacity_gb)


def segment_name(context: StageContext, below: Any) -> str:
    """Equal for the processes that may share a cache: same namespace over the same storage."""
    digest = hashlib.sha256(b"ucm/cache/1/" + context.namespace_digest)
    digest.update(context.namespace_dir_name.encode() + b"/" + below.identity)
    return digest.hexdigest()[:24]


def build_cache(context: StageContext, config: CacheConfig, below: Any) -> Any:
    """Attach to the node's cache or create it; None: not enough memory, go on without.

    A scheduler watches the workers' cache: it maps the control part alone and allocates nothing.
    Raises ``ConfigError`` that names what is needed, what there is and what to do.
    """
    if context.role == "tool":
        return None  # tools work on what is stored, and must not keep a node's memory alive
    reserve = config.cache_load_exclusive_buffer_number
    optional = config.cache_when_short == "without"
    removed = _native.reclaim_dead_caches(SEGMENT_DIRECTORY)
    if removed:
        logger.info("removed the caches of processes that are gone: %s", ", ".join(removed))
    try:
        tier = _native.cache_tier(
            native_geometry(context.geometry),
            name=segment_name(context, below),
            namespace_digest=context.namespace_digest,
            capacity_bytes=config.cache_buffer_capacity_gb,
            capacity_explicit=not optional,
            shared=config.share_buffer_enable,
            load_reserve=1024 if reserve is None else reserve,
            load_reserve_explicit=reserve is not None,
            rank=context.local_rank,
            rank_size=config.local_rank_size or context.local_rank_size,
            watcher=context.role == "scheduler",
            backend_only=config.cache_load_backend_only,
            directory=SEGMENT_DIRECTORY,
            quarantine_s=config.cache_quarantine_sec / 1000,
        )
    except _native.CacheTooSmallError as error:
        if not optional:
            raise ConfigError(str(error)) from error
        logger.warning("%s; going on without a host cache", error)
        return None
    except _native.CacheSetupError as error:
        raise ConfigError(str(error)) from error
    _report(context, tier)
    return tier


def _report(context: StageContext, tier: _native.HostTier) -> None:
    if context.role != "worker":
        return
    figures = tier.stats()
    logger.info(
        "%s: host cache of %s (%d blocks of %s), %s",
        context.owner or "Cache",
        format_size(figures["capacity_bytes"]),
        figures["slots_max"],
        format_size(figures["slot_bytes"]),
        "created" if figures["created"] else f"joined with {figures['processes_workers'] - 1} more",
    )
    if trouble := tier.health():
        logger.warning("%s", trouble)
