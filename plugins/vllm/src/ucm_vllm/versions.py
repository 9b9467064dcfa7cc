"""Which vLLM this adapter was written for, and what to say to any other."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

from ucm_core.errors import UnsupportedError

_log = logging.getLogger("ucm.vllm")

FLOOR = (0, 32)
#: First release that nobody has looked at.
CEILING = (0, 34)
SUPPORTED = f">={FLOOR[0]}.{FLOOR[1]},<{CEILING[0]}.{CEILING[1]}"
_WAY_OUT = (
    f"Install a supported release (pip install 'vllm{SUPPORTED}') or a ucm-vllm that supports this one, "
    "or start without UCMConnector"
)


def running_version() -> str:
    import vllm

    return str(vllm.__version__)


def check_version(version: str | None = None) -> None:
    """Refuse a vLLM that is too old; say one clear line about one that is untested.

    ``version`` is for tests; by default the running vLLM's.
    """
    if version is None:
        version = running_version()
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or version.startswith("0.0."):
        _log.warning("vLLM %s has no release number; supported vLLM: %s", version, SUPPORTED)
        return
    found = (int(match[1]), int(match[2]))
    if found < FLOOR:
        raise UnsupportedError(
            f"vLLM {version} is too old for this ucm-vllm; supported vLLM: {SUPPORTED}. {_WAY_OUT}"
        )
    if found >= CEILING:
        _log.warning(
            "vLLM %s was not tested with this ucm-vllm; supported vLLM: %s. %s if it misbehaves",
            version,
            SUPPORTED,
            _WAY_OUT,
        )


def load_connector(module: str = "ucm_vllm.connector", name: str = "UCMConnector") -> type[Any]:
    """The connector class, or ``UnsupportedError`` that says what the running vLLM does differently."""
    check_version()
    try:
        cls: type[Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UnsupportedError(
            f"vLLM {running_version()} does not have what this ucm-vllm imports ({error}); supported "
            f"vLLM: {SUPPORTED}. {_WAY_OUT}"
        ) from error
    if unknown := sorted(getattr(cls, "__abstractmethods__", ())):
        raise UnsupportedError(
            f"vLLM {running_version()} asks its connectors for {', '.join(unknown)}, which this ucm-vllm "
            f"does not know; supported vLLM: {SUPPORTED}. {_WAY_OUT}"
        )
    return cls
