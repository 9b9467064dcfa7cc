"""Which vLLM this adapter was written and tested for."""

from __future__ import annotations

import logging
import re

from ucm_core.errors import UnsupportedError

_log = logging.getLogger("ucm.vllm")

FLOOR = (0, 32)
#: First release that nobody has looked at.
CEILING = (0, 34)
SUPPORTED = f">={FLOOR[0]}.{FLOOR[1]},<{CEILING[0]}.{CEILING[1]}"


def check_version(version: str | None = None) -> None:
    """Refuse a vLLM that is too old; say one clear line about one that is untested.

    ``version`` is for tests; by default the running vLLM's.
    """
    if version is None:
        import vllm

        version = str(vllm.__version__)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or version.startswith("0.0."):
        _log.warning("vLLM %s has no release number; supported vLLM: %s", version, SUPPORTED)
        return
    found = (int(match[1]), int(match[2]))
    if found < FLOOR:
        raise UnsupportedError(
            f"vLLM {version} is too old for this ucm-vllm; supported vLLM: {SUPPORTED}"
        )
    if found >= CEILING:
        _log.warning(
            "vLLM %s was not tested with this ucm-vllm; supported vLLM: %s. If it misbehaves, use a "
            "tested release or a newer ucm-vllm",
            version,
            SUPPORTED,
        )
