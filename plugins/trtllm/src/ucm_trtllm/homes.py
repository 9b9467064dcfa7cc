"""The engine's connector interface, wherever this release keeps it."""

from __future__ import annotations

import importlib
from types import ModuleType

from ucm_core.errors import UnsupportedError

#: Module homes, newest first: 1.3 and later, up to 1.2.
HOMES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def interface() -> ModuleType:
    """The module with the two base classes. Raises UnsupportedError where no known home has them."""
    for name in HOMES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A home that is not there is another release; anything missing inside one is the engine's.
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
    raise UnsupportedError(
        f"TensorRT-LLM's connector interface is in none of {', '.join(HOMES)}: releases 1.2 and 1.3 have "
        "it; is another tensorrt_llm on the path?"
    )
