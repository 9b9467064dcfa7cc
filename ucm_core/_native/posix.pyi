from ucm_core._native.stages import Geometry, Stage

class PosixSetupError(RuntimeError): ...

class PosixStage(Stage):
    def __init__(
        self,
        geometry: Geometry,
        *,
        roots: list[str],
        namespace_dir: str,
        namespace_digest: bytes,
        direct: bool = ...,
        engine: str = ...,
        read_threads: int = ...,
        depth: int = ...,
        fsync: bool = ...,
        verify_checksums: bool = ...,
        stall_ms: int = ...,
        lookup_timeout_ms: int = ...,
        touch_interval_ms: int = ...,
        probe_interval_ms: int = ...,
        gc_enabled: bool = ...,
        capacity_bytes: int = ...,
        gc_trigger: float = ...,
        gc_recycle: float = ...,
        gc_candidate_extra: float = ...,
        gc_interval_ms: int = ...,
        orphan_age_ms: int = ...,
        lease_ttl_ms: int = ...,
        layout: str = ...,
        shm_directory: str = ...,
        quarantine_ms: int = ...,
    ) -> None: ...
    def describe(self) -> dict[str, str]: ...
    def last_errors(self) -> list[str]: ...
    def collect_now(self, timeout_s: float = ...) -> bool: ...
