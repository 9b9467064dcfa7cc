"""What the entry point names: registers the stage `Posix` and its pipeline."""

from __future__ import annotations

from collections.abc import Callable

from ucm_backend_posix.build import build_posix
from ucm_backend_posix.config import PosixConfig
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import PipelineSpec, StageSpec

UCM_API_VERSION = (1, 0)


@hookimpl
def ucm_register_stages(register: Callable[[StageSpec], None]) -> None:
    """The stage over files."""
    register(
        StageSpec(
            "Posix",
            "one file per block below mounted directories; no server",
            PosixConfig,
            build_posix,
            persistent=True,
        )
    )


@hookimpl
def ucm_register_pipelines(register: Callable[[PipelineSpec], None]) -> None:
    """Pipelines that need nothing but this package."""
    register(
        PipelineSpec("Posix", ("Posix",), "files alone; every load comes from the directories")
    )
