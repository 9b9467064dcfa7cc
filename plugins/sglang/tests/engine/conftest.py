"""Real SGLang engines, each a process of its own, forked from one warm import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_harness import EnginePool

_TESTS = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def engines() -> Iterator[EnginePool]:
    paths = [_TESTS / "support", _TESTS.parents[2] / "examples"]
    env = {"UCM_HARNESS_ENGINE": "sglang_engine", "SGLANG_USE_CPU_ENGINE": "1"}
    with EnginePool(sys.executable, paths, env) as pool:
        yield pool
