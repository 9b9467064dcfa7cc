"""What became of each plugin, and how an error of a plugin is put into words."""

from __future__ import annotations

import enum
import traceback
from dataclasses import dataclass


class PluginStatus(enum.Enum):
    """``LOADED`` serves; the others registered nothing, for the reason in the report."""

    LOADED = "loaded"
    DISABLED = "disabled"
    INCOMPATIBLE = "incompatible"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class PluginReport:
    """One line of ``ucm plugins``.

    ``provides`` names what the plugin registered (``("stage", "Posix")``); for a plugin that failed, what
    it had tried to register before it failed, so that a configuration that needs one of these names
    can be told why it is missing.
    """

    name: str
    status: PluginStatus
    reason: str
    distribution: str
    version: str
    module: str
    location: str
    provides: tuple[tuple[str, str], ...] = ()

    @property
    def owner(self) -> str:
        """How messages name this plugin: ``plugin 'posix' (ucm-backend-posix 0.1.0)``."""
        return describe_owner(self.name, self.distribution, self.version)


def describe_owner(name: str, distribution: str, version: str) -> str:
    """``plugin 'posix' (ucm-backend-posix 0.1.0)``."""
    return f"plugin '{name}' ({distribution or 'unknown distribution'} {version or '?'})"


def describe_error(error: BaseException) -> str:
    """The error, its original cause and where it was raised, in one line.

    ``ImportError: ... (at /site/x/plugin.py:3); caused by OSError: libfoo.so.1: cannot open ...``
    """
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(parts) < 6:
        seen.add(id(current))
        parts.append(_one_error(current))
        hidden = current.__suppress_context__ and current.__cause__ is None
        current = current.__cause__ or (None if hidden else current.__context__)
    return "; caused by ".join(parts)


def _one_error(error: BaseException) -> str:
    text = _safe_str(error)
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" (at {error.filename}:{error.lineno})"
        text = error.msg or text
    else:
        trace = traceback.extract_tb(error.__traceback__)
        frames = [f for f in trace if not _is_import_machinery(f.filename)]
        if frames:  # none: it was raised by the import itself, and the text names what is missing
            place = f" (at {frames[-1].filename}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _is_import_machinery(filename: str) -> bool:
    ours = filename.endswith("ucm_core/plugins/loading.py")
    return ours or filename.startswith("<frozen importlib") or "/importlib/" in filename


def _safe_str(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a third party's __str__ may itself be broken
        return "<the error's own text could not be made>"
    return " ".join(text.split())[:2000]
