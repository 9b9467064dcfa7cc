"""The core's own retention rule, registered like anybody else's."""

from __future__ import annotations

from collections.abc import Callable

from ucm_core.coordinator.retention import DefaultRetention
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import RetentionSpec

UCM_API_VERSION = (1, 1)


@hookimpl
def ucm_register_retention(register: Callable[[RetentionSpec], None]) -> None:
    register(
        RetentionSpec(
            "default",
            "at the end, at a shared boundary nobody served, and every N tokens",
            DefaultRetention,
        )
    )
