"""Connectors of lmcache and kvbm: their classes construct against the stub's interface, and run in it."""

from __future__ import annotations

import inspect
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stub_interface
from prompts import SHARED, prompt
from stub_executor import StubExecutor
from stub_manager import StubRequest
from stub_memory import Shape

Load = Callable[[str], ModuleType]

CLASSES = [
    (
        "lmcache.integration.tensorrt_llm.tensorrt_adapter",
        "LMCacheKvConnectorScheduler",
        "LMCacheKvConnectorWorker",
    ),
    (
        "lmcache.integration.tensorrt_llm.tensorrt_mp_adapter",
        "LMCacheMPKvConnectorScheduler",
        "LMCacheMPKvConnectorWorker",
    ),
    (
        "kvbm.trtllm_integration.connector",
        "DynamoKVBMConnectorLeader",
        "DynamoKVBMConnectorWorker",
    ),
]


@pytest.mark.parametrize(("module", "scheduler", "worker"), CLASSES)
def test_classes_fit_the_interface(peer: Load, module: str, scheduler: str, worker: str) -> None:
    """Nothing abstract is left, and every method they override has the stub's arguments."""
    loaded = peer(module)
    bases = (stub_interface.NewScheduler, stub_interface.NewWorker)
    for name, base in zip((scheduler, worker), bases, strict=True):
        theirs = getattr(loaded, name)
        assert issubclass(theirs, base) and not theirs.__abstractmethods__
        overridden = 0
        for method, ours in inspect.getmembers(base, inspect.isfunction):
            if not method.startswith("_") and getattr(theirs, method) is not ours:
                wanted = list(inspect.signature(ours).parameters)
                found = list(inspect.signature(inspect.unwrap(getattr(theirs, method))).parameters)
                assert found == wanted, f"{name}.{method}"
                overridden += 1
        assert overridden >= 4


class MemoryEngine:
    """What LMCache's adapter asks of its engine, in memory: whole pages by the tokens before them."""

    gpu_connector = None

    def __init__(self, stored: dict[tuple[int, ...], np.ndarray], page_tokens: int) -> None:
        self.stored, self.page_tokens = stored, page_tokens
        self.pool: np.ndarray | None = None

    def _pages(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [
            tuple(tokens[:n]) for n in range(self.page_tokens, len(tokens) + 1, self.page_tokens)
        ]

    def lookup(self, tokens: list[int]) -> int:
        hit = 0
        for key in self._pages(tokens[:-1]):
            if key not in self.stored:
                break
            hit = len(key)
        return hit

    def store(self, tokens: list[int], block_ids: list[int]) -> None:
        assert self.pool is not None
        for key, page in zip(self._pages(tokens), block_ids, strict=False):
            self.stored.setdefault(key, self.pool[page].copy())

    def retrieve(self, tokens: list[int], block_ids: list[int]) -> None:
        assert self.pool is not None
        for key, page in zip(self._pages(tokens), block_ids, strict=False):
            if key not in self.stored:
                break
            self.pool[page] = self.stored[key]


def run_lmcache(
    peer: Load,
    monkeypatch: pytest.MonkeyPatch,
    stored: dict[tuple[int, ...], np.ndarray],
    request: StubRequest,
) -> StubExecutor:
    """One engine with LMCache's in-process adapter; its CUDA engine replaced by one in memory."""
    module, shape = peer(CLASSES[0][0]), Shape()
    engine = MemoryEngine(stored, shape.page_tokens)

    def made(llm_args: Any, kv_cache_tensor: Any) -> MemoryEngine:
        engine.pool = kv_cache_tensor.array
        return engine

    monkeypatch.setattr(module, "_get_or_create_engine", made)
    monkeypatch.setattr(module.LMCacheEngineBuilder, "get", lambda name: engine)
    home = sys.modules[stub_interface.NEW_HOME]
    kv = SimpleNamespace(tokens_per_block=shape.page_tokens)
    args = SimpleNamespace(model="m", kv_cache_config=kv, tensor_parallel_size=1)
    names = (CLASSES[0][1], CLASSES[0][2])
    executor = StubExecutor(module, home, args, shape, names=names, chunk=512)
    executor.run(request)
    executor.close()
    return executor


def test_lmcache_runs_in_the_stub(peer: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loads find the pages that the stub gave, its saves the bytes that the stub computed: the stub
    checks every byte that a step reads."""
    stored: dict[tuple[int, ...], np.ndarray] = {}
    run_lmcache(peer, monkeypatch, stored, StubRequest(1, SHARED + prompt(2, 20)))
    assert len(stored) == (256 + 20) // 8
    second = StubRequest(2, SHARED + prompt(3, 30))
    executor = run_lmcache(peer, monkeypatch, stored, second)
    assert second.matched == [(0, 256)]
    assert executor.checked >= 256


def test_the_stub_catches_a_connector_that_is_wrong(
    peer: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stored page changed: the same connector, and the stub says no."""
    stored: dict[tuple[int, ...], np.ndarray] = {}
    run_lmcache(peer, monkeypatch, stored, StubRequest(1, SHARED + prompt(2, 20)))
    stored[tuple(SHARED[:64])][0, 0, 5] += 1
    with pytest.raises(AssertionError, match=r"wrong bytes at tokens 56\.\.64"):
        run_lmcache(peer, monkeypatch, stored, StubRequest(2, SHARED + prompt(3, 30)))


def test_kvbm_constructs(peer: Load) -> None:
    """Its leader is built by the stub's arguments. It answers only when workers with GPU memory have
    registered, which this machine has none of."""
    peer(CLASSES[2][0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = Path(stub_interface.__file__).with_name("kvbm_process.py")
    command = [sys.executable, str(script), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("MADE ")]
    made = json.loads(line.removeprefix("MADE "))
    assert made["DynamoKVBMConnectorLeader"] == "DynamoKVBMConnectorLeader", done.stderr[-2000:]
