"""Public connectors for TensorRT-LLM in the stub: code we did not write judges the stub."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import stub_interface


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # What they import warns of its own accord.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session")
def peer() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a connector's module against the stub's interface (new home)."""
    stand_ins = stub_interface.modules(new=True)
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)

    def load(name: str) -> ModuleType:
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"this interpreter has no {package}: run `make test-trtllm`")
        return importlib.import_module(name)

    yield load
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
