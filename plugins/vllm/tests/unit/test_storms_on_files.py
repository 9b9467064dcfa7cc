"""Storms over our own stores and real files, which somebody damages and removes meanwhile."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

from engine_harness.tamper import DAMAGES, DATA_OFFSET
from real_stores import RealWorld
from scripted_engine import ScriptedEngine, expected, prompt
from ucm_vllm import lookup

PIPELINES = ["Posix", "Cache|Posix"]


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "INLINE_WAIT_S", 10.0)


def _vandalise(world: RealWorld, rng: random.Random) -> None:
    files = world.files() if rng.random() < 0.1 else []
    with contextlib.suppress(FileNotFoundError):  # the store removes what was damaged before
        files = [path for path in files if path.stat().st_size > DATA_OFFSET]  # whole ones
        if files:
            DAMAGES[rng.choice(["flip_byte", "truncate", "delete", "empty"])](rng.choice(files))


def _drain(engine: ScriptedEngine) -> None:
    deadline = time.monotonic() + 30
    while engine.scheduler.has_requests() or engine.in_flight or engine.pending():
        states = {r.request_id: r.status.name for r in engine.scheduler.requests.values()}
        assert time.monotonic() < deadline, f"does not come to an end: {engine.pending()} {states}"
        engine.steps = 0
        if engine.scheduler.has_requests() or engine.pending():
            engine.step()
        else:
            engine.finish_oldest()


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("seed", range(6))
def test_storm_over_files(engine_over, tmp_path: Path, pipeline: str, seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {"posix_io_engine": rng.choice(["auto", "psync"])}
    if "Cache" in pipeline:
        options["cache_buffer_capacity_gb"] = "2 MiB"
        options["cache_load_exclusive_buffer_number"] = 0
    world = RealWorld(tmp_path, pipeline, **options)
    modes: list[dict[str, Any]] = [{}, {"depth": 2}, {"runner": "v2"}]
    e = engine_over(world, blocks=22, max_num_seqs=4, **rng.choice(modes))
    prefixes = [prompt(i, 160) for i in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for step in range(120):
        if rng.random() < 0.3 and len(e.scheduler.requests) < 6:
            name = f"r{step}"
            tokens = rng.choice(prefixes)[: rng.randint(60, 160)] + prompt(step + 100, 30)
            asked[name] = (tokens, rng.randint(1, 40))
            e.add(name, tokens, max_tokens=asked[name][1])
        if asked and rng.random() < 0.05:
            e.abort(rng.choice(list(asked)))
        _vandalise(world, rng)
        e.step()
    _drain(e)
    assert e.scheduler.requests == {}
    assert e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == e.kv.num_blocks - 1
    assert e.counted.get("anomalies", 0) == 0
    assert e.counted["save_blocks"] > 0
    for name, (tokens, count) in asked.items():
        answer = e.outputs.get(name, [])
        assert answer == expected(tokens, count)[: len(answer)]
    # What is left in the directory is right for the next process as well.
    again = engine_over(world)
    for name in list(asked)[:5]:
        tokens, count = asked[name]
        assert again.generate(name, tokens, max_tokens=2) == expected(tokens, 2)
