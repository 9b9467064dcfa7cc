"""B48: what a waiting request needs moves up before it runs, and a load that takes too long is given up."""

from __future__ import annotations

import time

import pytest

from scripted_engine import ScriptedEngine, World, prompt
from ucm_vllm import ahead, worker


@pytest.fixture
def tiered(world: World) -> World:
    """A world whose pipeline has a tier to move things up to."""
    world.settings["tiers"] = ("Cache", "Posix")
    return world


def _prefetched(e: ScriptedEngine) -> list[bytes]:
    return [key for rank in e.ranks for key in rank.worker.deployment_store().prefetched]


def _ids(e: ScriptedEngine, tokens: list[int]) -> list[bytes]:
    seed = e.connector._deployment.placement.all()[0].seed
    return [bytes(row) for row in e.chain_of(tokens).object_ids(seed)]


def test_a_request_that_waits_is_fetched_before_it_is_scheduled(engine, tiered: World) -> None:
    stored, other = prompt(1, 200), prompt(2, 100)
    wanted = engine().generate("a", stored)
    e = engine(max_num_seqs=1)
    e.add("runs", other, max_tokens=40)
    e.step()
    e.add("waits", stored)
    for _ in range(50):
        e.step()
        if _prefetched(e):
            break
    assert _prefetched(e) == _ids(e, stored)[:3], "its three whole blocks, once"
    assert not [task for task in e.all_tasks() if task.kind == "load"], "it still waits"
    assert "waits" not in {request.request_id for request in e.scheduler.running}
    e.run()
    assert e.outputs["waits"] == wanted
    assert _prefetched(e) == _ids(e, stored)[:3]
    assert e.counted["prefetched_blocks"] == 3
    assert e.pending() == {}


def test_who_is_admitted_at_once_or_has_nothing_stored_is_not_fetched(
    engine, tiered: World
) -> None:
    stored = prompt(1, 200)
    engine().generate("a", stored)
    e = engine(max_num_seqs=1)
    e.generate("at once", stored)
    e.add("runs", prompt(3, 100), max_tokens=20)
    e.step()
    e.add("new", prompt(4, 200))
    e.add("gone", stored)
    e.abort("gone")
    e.run()
    assert _prefetched(e) == []
    assert e.pending() == {}


def test_a_pipeline_of_one_tier_is_not_asked(engine, world: World) -> None:
    world.settings["tiers"] = ("Posix",)
    stored = prompt(1, 200)
    engine().generate("a", stored)
    e = engine(max_num_seqs=1)
    e.add("runs", prompt(2, 100), max_tokens=40)
    e.step()
    e.add("waits", stored)
    e.run()
    assert _prefetched(e) == []


def test_a_burst_of_arrivals_is_bounded(engine, tiered: World, monkeypatch) -> None:
    monkeypatch.setattr(ahead, "BLOCKS_LIMIT", 2)
    stored = [prompt(seed, 200) for seed in range(6)]
    for index, tokens in enumerate(stored):
        engine().generate(f"a{index}", tokens)
    e = engine(max_num_seqs=1)
    e.add("runs", prompt(9, 100), max_tokens=90)
    e.step()
    for index, tokens in enumerate(stored):
        e.add(f"b{index}", tokens)
    before = 0
    for _ in range(50):  # the lookups' thread answers between the steps
        e.step()
        now = len(_prefetched(e))
        assert now - before <= ahead.LOOKS_PER_STEP * 2
        before = now
        if before == len(stored) * 2:
            break
        time.sleep(0.02)
    assert before == len(stored) * 2
    e.run()
    assert e.pending() == {}


def test_a_load_slower_than_the_limit_is_given_up_and_computed(
    engine, world: World, monkeypatch
) -> None:
    tokens = prompt(5, 200)
    wanted = engine().generate("a", tokens)
    monkeypatch.setattr(worker, "DEADLINE_SLACK_S", 0.0)
    world.settings["timeout_ms"] = 50
    world.auto = False  # the store never gets round to the load
    e = engine(enable_prefix_caching=False)
    e.add("b", tokens)
    for _ in range(2000):
        e.step()
        for task in e.all_tasks():
            if task.kind == "dump":
                task.run()
                task.finish()
        if not e.scheduler.has_requests():
            break
    assert e.outputs["b"] == wanted
    assert sum(n for name, n in e.counted.items() if name.startswith("load_failed_blocks")) == 3
    loads = [task for task in e.all_tasks() if task.kind == "load"]
    assert len(loads) == 1
    loads[0].run()  # late: nothing of it may reach the engine's memory
    assert e.generate("c", prompt(6, 40)) == engine().generate("c", prompt(6, 40))
