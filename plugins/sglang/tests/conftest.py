"""Makes what the tests share importable, and SGLang's host pools usable without a device."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent
#: The harness that runs engines as processes is the one of the vLLM adapter's tests.
_HARNESS = _TESTS.parents[1] / "vllm" / "tests" / "support"
for _path in (_TESTS.parents[2] / "examples", _TESTS / "support", _HARNESS):
    if str(_path) not in sys.path:
        sys.path.insert(0, str(_path))

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("sglang") is None
    for item in items:
        if _TESTS not in item.path.parents:
            continue
        if missing:
            reason = "this interpreter has no SGLang: run `make test-sglang`"
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))
