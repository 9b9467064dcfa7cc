"""Every name is an empty class, enough for annotations and isinstance checks."""

from __future__ import annotations

from typing import Any


def any_class(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
