"""Real vLLM and real SGLang, each in an environment of its own, over one cache directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for _path in (
    "examples",
    "plugins/vllm/tests/support",
    "plugins/sglang/tests/support",
    "plugins/trtllm/tests/support",
):
    if str(ROOT / _path) not in sys.path:
        sys.path.insert(0, str(ROOT / _path))

from engine_harness import EnginePool  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(420))


def _python(environment: str, target: str) -> str:
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{environment} is not built: run `make {target}`")
    return str(python)


@pytest.fixture(scope="session")
def vllm() -> Iterator[EnginePool]:
    with EnginePool(_python(".venv-vllm", "engine-vllm"), [ROOT / "examples"]) as pool:
        yield pool


@pytest.fixture(scope="session")
def sglang() -> Iterator[EnginePool]:
    paths = [ROOT / "plugins/sglang/tests/support", ROOT / "examples"]
    env = {"UCM_HARNESS_ENGINE": "sglang_engine", "SGLANG_USE_CPU_ENGINE": "1"}
    with EnginePool(_python(".venv-sglang", "engine-sglang"), paths, env) as pool:
        yield pool
