"""Seeded storms: random arrivals, aborts and preemptions over a slow and failing store.

Few blocks make vLLM preempt all the time. Whatever happens: every byte that a step reads is right (the
scripted model checks), every answer is right, what is stored is right, each id is told once per
direction, nothing is left over. A failing seed is a complete reproduction: run it alone.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripted_engine import ScriptedEngine, World, expected, prompt
from stored_bytes import check_stored
from ucm_core.store.contract import Status
from ucm_vllm import lookup

FAULTS = [Status.IO_ERROR, Status.TIMEOUT, Status.CORRUPT, Status.REJECTED]
#: Steps in flight, whether the worker runs a step only when its result is wanted, the model runner.
MODES: list[dict[str, Any]] = [
    {},
    {"depth": 2},
    {"depth": 2, "lagging": True},
    {"drafts": 3},
    {"runner": "v2"},
    {"runner": "v2", "depth": 2},
    {"runner": "0.33", "depth": 2},
    {"runner": "0.33", "depth": 3, "lagging": True},
]
SEEDS = 200


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for its lookup, so that a seed means the same storm on a busy machine."""
    monkeypatch.setattr(lookup, "INLINE_WAIT_S", 10.0)


@dataclass
class Storm:
    """One seed's weather, and what was asked of the engine."""

    rng: random.Random
    steps: int = 70
    #: Chance that a task makes progress in a step, that an object fails, that a lookup raises.
    speed: float = 0.4
    bad: float = 0.05
    blind: float = 0.02
    asked: dict[str, tuple[list[int], int]] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int) -> Storm:
        rng = random.Random(seed)
        return cls(rng, speed=rng.choice([0.1, 0.4, 0.9]), bad=rng.choice([0.0, 0.05, 0.3]))

    def drive(self, engine: ScriptedEngine) -> None:
        rng = self.rng
        prefixes = [prompt(i, 160) for i in range(3)]
        live: list[str] = []
        for store in engine.connector._deployment._stores.values():
            self._blindfold(store)
        for step in range(self.steps):
            if rng.random() < 0.35 and len(engine.scheduler.requests) < 6:
                name = f"r{step}"
                head = rng.choice(prefixes)[: rng.randint(20, 160)]
                tokens = head + prompt(step + 100, rng.randint(1, 60))
                self.asked[name] = (tokens, rng.randint(1, 50))
                salt = rng.choice([None, None, "tenant"])
                engine.add(name, tokens, max_tokens=self.asked[name][1], cache_salt=salt)
                live.append(name)
            if live and rng.random() < 0.08:
                engine.abort(live.pop(rng.randrange(len(live))))
            if rng.random() < 0.02:
                everyone = rng.random() < 0.5
                # vLLM raises when the blocks of a load or a save are held; what it did stays done.
                with contextlib.suppress(RuntimeError):
                    engine.scheduler.reset_prefix_cache(reset_running_requests=everyone)
            engine.step()
            self.serve(engine)

    def _blindfold(self, store: Any) -> None:
        real_lookup = store.lookup

        def sometimes_blind(ids: np.ndarray) -> np.ndarray:
            if self.rng.random() < self.blind:
                raise OSError(5, "Input/output error")
            return real_lookup(ids)

        store.lookup = sometimes_blind

    def serve(self, engine: ScriptedEngine) -> None:
        """The store gets some of its work done, sometimes badly."""
        rng = self.rng
        for task in engine.all_tasks():
            if rng.random() < self.speed and not task.check():
                keys = dict.fromkeys(task.ids)
                task.run({k: rng.choice(FAULTS) for k in keys if rng.random() < self.bad})
            if rng.random() < self.speed and task.kind == "dump" and task.check():
                task.finish()


def _drain(engine: ScriptedEngine) -> None:
    for _ in range(3000):
        for task in engine.all_tasks():
            task.run()
            task.finish()
        if engine.scheduler.has_requests():
            engine.step()
        elif engine.in_flight:
            engine.finish_oldest()
        else:
            break
    else:
        raise AssertionError(f"does not come to an end: {engine.pending()}")
    engine.step()
    engine.run()


def _check_reports(engine: ScriptedEngine) -> None:
    """Every load is told received once, every held request sent once, nothing else is told."""
    sent, received = engine.check_told_once()
    assert sent == engine.held
    assert received == engine.loaded


def _check_answers(engine: ScriptedEngine, storm: Storm) -> None:
    for name, (tokens, count) in storm.asked.items():
        answer = engine.outputs.get(name, [])
        assert answer == expected(tokens, count, engine.salts[name])[: len(answer)]
        if str(engine.finished.get(name)) == "length":
            assert len(answer) == count


@pytest.mark.parametrize("seed", range(SEEDS))
def test_storm(engine, world: World, seed: int) -> None:
    world.auto = False
    storm = Storm.of(seed)
    e = engine(
        blocks=18 + 4 * storm.rng.randrange(3),
        max_num_seqs=4,
        max_num_batched_tokens=storm.rng.choice([64, 96, 256]),
        mla=storm.rng.random() < 0.5,
        **MODES[seed % len(MODES)],
    )
    _check_storm(e, storm)


@pytest.mark.parametrize("seed", range(24))
def test_storm_over_windows(engine_over, tmp_path: Path, seed: int) -> None:
    """B07: blocks that a window leaves behind are reused while they are being copied."""
    storm = Storm.of(seed + 1000)
    windows = storm.rng.choice([(48, 48, None), (80, None)])
    e = engine_over(
        World(tmp_path, auto=False, windows=windows),
        blocks=36 + 6 * storm.rng.randrange(3),
        max_num_seqs=4,
        max_num_batched_tokens=storm.rng.choice([64, 96, 256]),
        **MODES[seed % len(MODES)],
    )
    _check_storm(e, storm)


def _check_storm(e: ScriptedEngine, storm: Storm) -> None:
    patient = storm.rng.random() < 0.75
    for store in e.stores:
        store.copy_when_waited = patient
    storm.drive(e)
    _drain(e)
    assert e.pending() == {}
    assert e.scheduler.requests == {}
    free = e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == e.kv.num_blocks - 1
    assert e.counted.get("anomalies", 0) == 0
    _check_reports(e)
    _check_answers(e, storm)
    check_stored(e, {n: tokens + e.outputs.get(n, []) for n, (tokens, _) in storm.asked.items()})


def test_the_storms_reach_what_they_are_for(engine, world: World) -> None:
    """Preemptions, loads, saves, failures and aborts all happen; a storm without them shows nothing."""
    world.auto = False
    storm = Storm(random.Random(3), steps=400, bad=0.25)
    e = engine(blocks=16, max_num_seqs=4, max_num_batched_tokens=96)
    preempted = 0
    before = e.scheduler._preempt_request

    def count(*args: object, **kw: object) -> None:
        nonlocal preempted
        preempted += 1
        before(*args, **kw)

    e.scheduler._preempt_request = count
    storm.drive(e)
    _drain(e)
    kinds = {key.partition("|")[0] for key in e.counted}
    assert preempted > 2
    assert {"load_blocks", "save_blocks", "load_failed_blocks", "save_failed_blocks"} <= kinds
    assert {"lookup_failures", "touched_objects"} <= kinds
    assert {"length"} <= {str(reason) for reason in e.finished.values()}
    _check_reports(e)
    answered = {n: tokens + e.outputs.get(n, []) for n, (tokens, _) in storm.asked.items()}
    assert check_stored(e, answered) > 10
