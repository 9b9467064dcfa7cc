"""Fixtures of the engine tests. Each engine is a process of its own, forked from one warm import."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_cases import CORPUS, PREFIX, Saved, Truth, answers, corpus_job, engine_of, ucm
from engine_harness import EnginePool, Round
from engine_harness.job import LOCAL_HITS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # The first test also pays for the warm import; each engine has a deadline of its own.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session")
def engine_python() -> str:
    """Interpreter that has vLLM: this one, or ``$UCM_ENGINE_PYTHON``."""
    chosen = os.environ.get("UCM_ENGINE_PYTHON", sys.executable)
    if chosen == sys.executable and importlib.util.find_spec("vllm") is None:
        pytest.skip(
            "this interpreter has no vLLM: run `make test-engine`, or set UCM_ENGINE_PYTHON"
        )
    return chosen


@pytest.fixture(scope="session")
def engines(engine_python: str) -> Iterator[EnginePool]:
    with EnginePool(engine_python) as pool:
        yield pool


@pytest.fixture(scope="session")
def truth(engines: EnginePool) -> Callable[[str], Truth]:
    """Answers of the corpus without a connector, per model: computed, and from vLLM's own cache."""
    known: dict[str, Truth] = {}

    def of(model: str) -> Truth:
        if model not in known:
            engine = engine_of(model)
            one_after_another = Round(CORPUS, max_tokens=12, together=False)
            cold = corpus_job(model, engine={**engine, "enable_prefix_caching": False})
            cold.rounds = [one_after_another]
            local = corpus_job(model, setup="engine_scenarios:allow_local_prefix_cache")
            local.rounds = [one_after_another]
            computed, cached = [r.require_ok() for r in engines.run_all([cold, local])]
            assert computed.metric(LOCAL_HITS) == 0
            assert cached.local_hits() == PREFIX * (len(CORPUS) - 1)
            known[model] = Truth(answers(computed), answers(cached)[1:])
        return known[model]

    return of


@pytest.fixture(scope="session")
def saved(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A directory filled by one engine process per model. Copy it before you damage it."""
    known: dict[str, Saved] = {}

    def of(model: str) -> Saved:
        if model not in known:
            directory = tmp_path_factory.mktemp(f"saved-{model}")
            job = corpus_job(model, connector=ucm(directory))
            job.scenario = "engine_scenarios:leftovers"  # every save has ended and is counted
            run = engines.run(job).require_ok()
            known[model] = Saved(directory, run)
        return known[model]

    return of


@pytest.fixture
def filled(saved: Callable[[str], Saved], tmp_path: Path) -> Path:
    """A private copy of what a qwen3 process saved."""
    directory = tmp_path / "kv"
    shutil.copytree(saved("qwen3").directory, directory)
    return directory


@pytest.fixture
def kv_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "kv"
    directory.mkdir()
    return directory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, room for about 15 stored blocks of qwen3."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("this machine does not let us mount a small tmpfs")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)
