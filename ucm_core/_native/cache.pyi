from ucm_core._native.stages import Geometry, HostTier

class CacheSetupError(RuntimeError): ...
class CacheTooSmallError(CacheSetupError): ...

def cache_tier(
    geometry: Geometry,
    *,
    name: str,
    namespace_digest: bytes,
    capacity_bytes: int = ...,
    capacity_explicit: bool = ...,
    shared: bool = ...,
    load_reserve: int = ...,
    load_reserve_explicit: bool = ...,
    rank: int = ...,
    rank_size: int = ...,
    watcher: bool = ...,
    backend_only: bool = ...,
    directory: str = ...,
    quarantine_s: float = ...,
    touch_threads: int = ...,
) -> HostTier: ...
def reclaim_dead_caches(directory: str = ...) -> list[str]: ...
