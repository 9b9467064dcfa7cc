"""A native store over any stage, sized for tests: private staging buffers, or a private host cache."""

from __future__ import annotations

from typing import Any

from ucm_core import _native
from ucm_core.store.contract import Geometry
from ucm_core.store.native_store import NativeBlockStore, native_geometry

#: One copier and no second tries, so that what a test sees does not depend on timing.
OPTIONS: dict[str, Any] = {
    "timeout_ms": 20_000,
    "waiting_depth": 100,
    "running_depth": 8,
    "copiers": 1,
    "write_retries": 0,
    "retry_delay_ms": 1,
    "open_age_ms": 0,
}


def small_store(
    stage: Any,
    geometry: Geometry,
    *,
    cache_slots: int = 0,
    load_reserve: int = 1,
    shared: int = 1,
    **options: Any,
) -> NativeBlockStore:
    """The caller closes it. ``cache_slots``: over a host cache of so many objects; 0: over staging
    buffers, ``load_reserve`` for loads alone and ``shared`` for everybody. ``options``: of the native
    store, on top of :data:`OPTIONS`."""
    native = native_geometry(geometry)
    if cache_slots:
        tier = _native.cache_tier(
            native,
            name="test",
            namespace_digest=bytes(32),
            shared=False,
            capacity_bytes=cache_slots * native.object_bytes,
            load_reserve=0,
            load_reserve_explicit=True,
        )
    else:
        tier = _native.staging_tier(native, load_reserve=load_reserve, shared=shared)
    return NativeBlockStore(_native.Store(stage, tier, **{**OPTIONS, **options}), geometry)
