"""Seeded storms: random arrivals, aborts and preemptions over a slow and failing store.

Few blocks make vLLM preempt all the time. Whatever happens: every byte that a step reads is right (the
scripted model checks), every answer is right, each id is told once per direction, nothing is left over.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from scripted_engine import ScriptedEngine, World, expected, prompt
from ucm_core.store.contract import Status
from ucm_vllm import lookup


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for its lookup, so that a seed means the same storm on a busy machine."""
    monkeypatch.setattr(lookup, "INLINE_WAIT_S", 10.0)


FAULTS = [Status.IO_ERROR, Status.TIMEOUT, Status.CORRUPT, Status.REJECTED]


def _storm(
    engine: ScriptedEngine, rng: random.Random, steps: int, faults: float = 0.05
) -> dict[str, tuple[list[int], int]]:
    """Drive the engine; returns what was asked: name -> (tokens, answer length)."""
    prefixes = [prompt(i, 160) for i in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    live: list[str] = []
    for step in range(steps):
        if rng.random() < 0.25 and len(engine.scheduler.requests) < 6:
            name = f"r{step}"
            tokens = rng.choice(prefixes)[: rng.randint(20, 160)] + prompt(
                step + 100, rng.randint(1, 60)
            )
            asked[name] = (tokens, rng.randint(1, 50))
            engine.add(name, tokens, max_tokens=asked[name][1])
            live.append(name)
        if live and rng.random() < 0.05:
            engine.abort(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.01:
            engine.scheduler.reset_prefix_cache(reset_running_requests=False)
        engine.step()
        _serve(engine, rng, 0.4, faults)
    return asked


def _serve(engine: ScriptedEngine, rng: random.Random, chance: float, bad: float) -> None:
    """The store gets some of its work done, sometimes badly."""
    for task in engine.all_tasks():
        if rng.random() < chance and not task.check():
            faults = {
                key: rng.choice(FAULTS) for key in dict.fromkeys(task.ids) if rng.random() < bad
            }
            task.run(faults)
        if rng.random() < chance and task.kind == "dump" and task.check():
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


@pytest.mark.parametrize(
    ("depth", "lagging"),
    [(1, False), (2, False), (2, True)],
    ids=["sync", "async", "async-lagging"],
)
@pytest.mark.parametrize("seed", range(8))
def test_storm(engine, world: World, seed: int, depth: int, lagging: bool) -> None:
    world.auto = False
    rng = random.Random(seed)
    e = engine(
        blocks=18 + 4 * (seed % 3),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([64, 96, 256]),
        mla=bool(seed % 2),
        depth=depth,
        lagging=lagging,
    )
    _check_storm(e, rng, seed)


@pytest.mark.parametrize(
    ("depth", "lagging"),
    [(1, False), (2, False), (2, True)],
    ids=["sync", "async", "async-lagging"],
)
@pytest.mark.parametrize("seed", range(6))
def test_storm_over_windows(engine, tmp_path: Path, seed: int, depth: int, lagging: bool) -> None:
    """B07: blocks that a window leaves behind are reused while they are being copied."""
    world = World(tmp_path, auto=False, windows=(48, 48, None) if seed % 2 else (80, None))
    rng = random.Random(seed + 100)
    e = ScriptedEngine(
        world,
        blocks=36 + 6 * (seed % 3),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([64, 96, 256]),
        depth=depth,
        lagging=lagging,
    )
    _check_storm(e, rng, seed)
    e.close()


def _check_storm(e: ScriptedEngine, rng: random.Random, seed: int) -> None:
    for store in e.stores:
        store.copy_when_waited = bool(seed % 4)
    asked = _storm(e, rng, steps=150)
    _drain(e)
    assert e.pending() == {}
    assert e.scheduler.requests == {}
    free = e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == e.kv.num_blocks - 1
    assert e.counted.get("anomalies", 0) == 0
    sent: Counter[str] = Counter()
    for report in e.reports:
        sent.update(report.finished_sending or ())
        assert not (report.finished_sending or set()) & (report.finished_recving or set())
    assert all(count == 1 for count in sent.values())
    for name, (tokens, count) in asked.items():
        answer = e.outputs.get(name, [])
        assert answer == expected(tokens, count)[: len(answer)]
        if str(e.finished.get(name)) == "length":
            assert len(answer) == count


def test_the_storms_reach_what_they_are_for(engine, world: World) -> None:
    """Preemptions, loads, saves, failures and aborts all happen; a storm without them shows nothing."""
    world.auto = False
    rng = random.Random(3)
    e = engine(blocks=16, max_num_seqs=4, max_num_batched_tokens=96)
    preempted = 0
    before = e.scheduler._preempt_request

    def count(*args: object, **kw: object) -> None:
        nonlocal preempted
        preempted += 1
        before(*args, **kw)

    e.scheduler._preempt_request = count
    _storm(e, rng, steps=400, faults=0.25)
    _drain(e)
    kinds = {key.partition("|")[0] for key in e.counted}
    assert preempted > 2
    assert {"load_blocks", "save_blocks", "load_failed_blocks", "save_failed_blocks"} <= kinds
    assert {"length"} <= {str(reason) for reason in e.finished.values()}
