"""Entry point of the ``ucm`` plugin group: the reference engine registers as any engine does."""

from __future__ import annotations

from collections.abc import Callable

from ucm_core.hookspecs import hookimpl
from ucm_core.registry import EngineSpec

UCM_API_VERSION = (1, 0)


@hookimpl
def ucm_register_engines(register: Callable[[EngineSpec], None]) -> None:
    register(
        EngineSpec(
            name="reference",
            distribution="ucm-reference",
            tested_versions=("0.1",),
            turn_on="ucm_reference.cached_engine(model, options={...})",
            notes=("an engine for tests and demonstrations, in NumPy",),
        )
    )
