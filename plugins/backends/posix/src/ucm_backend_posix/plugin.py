"""What the entry point names: registers the stages `Posix`, `Compress` and `Cache` and their pipelines."""

from __future__ import annotations

from collections.abc import Callable

from ucm_backend_posix.build import build_posix
from ucm_backend_posix.cache import CacheConfig, build_cache, host_memory
from ucm_backend_posix.compress import CompressConfig, build_compress
from ucm_backend_posix.compress import host_memory as compress_memory
from ucm_backend_posix.config import PosixConfig
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import PipelineSpec, StageSpec

UCM_API_VERSION = (1, 0)


@hookimpl
def ucm_register_stages(register: Callable[[StageSpec], None]) -> None:
    """The stage over files, the one that compresses, and the host memory above any stage."""
    register(
        StageSpec(
            "Posix",
            "one file per block below mounted directories; no server",
            PosixConfig,
            build_posix,
            persistent=True,
        )
    )
    register(
        StageSpec(
            "Compress",
            "lossless compression of what the stage below keeps",
            CompressConfig,
            build_compress,
            needs_below=True,
            host_memory=compress_memory,
            guarded=False,
        )
    )
    register(
        StageSpec(
            "Cache",
            "host memory shared by all workers of a node",
            CacheConfig,
            build_cache,
            needs_below=True,
            host_memory=host_memory,
        )
    )


@hookimpl
def ucm_register_pipelines(register: Callable[[PipelineSpec], None]) -> None:
    """Pipelines that need nothing but this package."""
    register(
        PipelineSpec("Posix", ("Posix",), "files alone; every load comes from the directories")
    )
    register(
        PipelineSpec(
            "Cache|Posix",
            ("Cache", "Posix"),
            "host memory of the node over files; the default, no server",
        )
    )
    register(
        PipelineSpec(
            "Cache|Compress|Posix",
            ("Cache", "Compress", "Posix"),
            "host memory of the node over compressed files",
        )
    )
    register(PipelineSpec("Compress|Posix", ("Compress", "Posix"), "compressed files alone"))
    register(
        PipelineSpec(
            "Compress|Fake", ("Compress", "Fake"), "compression over a simulated medium, for tests"
        )
    )
    register(
        PipelineSpec(
            "Cache|Empty", ("Cache", "Empty"), "host memory alone; nothing outlives the workers"
        )
    )
    register(
        PipelineSpec(
            "Cache|Fake", ("Cache", "Fake"), "host memory over a simulated medium, for tests"
        )
    )
