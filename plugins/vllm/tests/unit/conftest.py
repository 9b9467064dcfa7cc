"""Unit tests of the adapter: vLLM's real scheduler and block pool, a scripted worker, a store in memory."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate their own parts while importing
    pytest.importorskip("vllm", reason="needs the engine environment of `make engine-vllm`")
    import scripted_engine  # noqa: F401

from scripted_engine import ScriptedEngine, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def engine_over() -> Iterator[Callable[..., ScriptedEngine]]:
    """Builds engines over given worlds and closes them."""
    engines: list[ScriptedEngine] = []

    def build(world: World, **kw: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(world, **kw))
        return engines[-1]

    yield build
    for one in engines:
        one.close()


@pytest.fixture
def engine(
    world: World, engine_over: Callable[..., ScriptedEngine]
) -> Callable[..., ScriptedEngine]:
    """Builds engines over one world and closes them."""
    return functools.partial(engine_over, world)
