"""Loads that fail: the engine recomputes exactly what is missing, once, and heals the store."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from scripted_engine import ScriptedEngine, World, prompt
from ucm_core.store.contract import Status


def _block_id(engine: ScriptedEngine, tokens: list[int], block: int) -> bytes:
    seed = engine.connector._deployment.placement.all()[0].seed
    return bytes(engine.chain_of(tokens).object_ids(seed)[block])


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("status", [Status.CORRUPT, Status.MISS, Status.IO_ERROR, Status.TIMEOUT])
def test_a_bad_block_is_recomputed_and_never_asked_for_twice(
    engine, world: World, bad: int, status: Status
) -> None:
    tokens = prompt(1, 200)
    wanted = engine().generate("a", tokens)
    e = engine()
    key = _block_id(e, tokens, bad)
    world.faults[key] = status
    assert e.generate("b", tokens) == wanted
    loads = [task for task in e.all_tasks() if task.kind == "load"]
    assert len(loads) == 1, "the failing key was asked for again"
    assert e.counted[f"load_failed_blocks|{status.name.lower()}"] == 1
    # The blocks behind it arrived but were not used; the good ones before it were.
    assert e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == e.kv.num_blocks - 1
    assert e.pending() == {}


def test_a_bad_block_is_offered_again_after_it_was_saved_anew(engine, world: World) -> None:
    tokens = prompt(2, 200)
    wanted = engine().generate("a", tokens)
    e = engine(enable_prefix_caching=False)
    key = _block_id(e, tokens, 1)
    world.faults[key] = Status.CORRUPT
    del world.objects[key]  # as a store does with a corrupt object
    # It was there when it was looked up.
    world.objects[key] = [None, None]
    e.add("b", tokens)
    e.step()
    del world.objects[key]
    world.faults.clear()
    e.run()
    assert e.outputs["b"] == wanted
    assert key in world.objects
    hits = e.counted["hit_tokens"]
    assert e.generate("c", tokens) == wanted
    assert e.counted["hit_tokens"] - hits == 192


def test_a_bad_block_that_stays_bad_is_given_up(engine, world: World) -> None:
    """A store that says "saved" and cannot deliver: three failed loads at most, then it is left out."""
    tokens = prompt(3, 200)
    wanted = engine().generate("a", tokens)
    e = engine(enable_prefix_caching=False)
    world.faults[_block_id(e, tokens, 1)] = Status.IO_ERROR
    for i in range(8):
        assert e.generate(f"b{i}", tokens) == wanted
    assert e.counted["load_failed_blocks|io_error"] <= 3
    assert e.counted["suppressed_blocks"] > 0


def test_a_request_fails_one_load_at_most(engine, world: World) -> None:
    """Even when the key was saved anew meanwhile: one failure, then the request computes for itself."""
    tokens = prompt(9, 200)
    engine().generate("a", tokens)
    e = engine()
    world.faults[_block_id(e, tokens, 0)] = Status.CORRUPT
    request = e.add("b", tokens)
    e.step()
    assert e.counted["load_failed_blocks|corrupt"] == 1
    e.connector._sched._bad.clear()
    assert e.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    e.run()


def test_policy_fail_ends_the_request_and_leaves_nothing(engine, world: World) -> None:
    tokens = prompt(4, 200)
    engine().generate("a", tokens)
    e = engine(policy="fail")
    world.faults[_block_id(e, tokens, 1)] = Status.CORRUPT
    e.add("b", tokens)
    e.run()
    assert str(e.finished["b"]) == "error"
    assert e.pending() == {}
    world.faults.clear()
    assert len(e.generate("c", tokens)) == 4


def test_only_pages_of_the_load_are_reported_never_local_ones(engine, world: World) -> None:
    """A stored block that is partly local: its local pages are read by others and are fine."""
    tokens = prompt(5, 250)
    engine().generate("a", tokens)
    e = engine()
    objects = dict(world.objects)
    world.objects.clear()
    e.generate("local", [*tokens[:96], 5], max_tokens=1)
    world.objects.update(objects)
    world.faults[_block_id(e, tokens, 1)] = Status.CORRUPT
    before = len(e.reports)
    e.generate("b", tokens)
    (bad,) = [r.invalid_block_ids for r in e.reports[before:] if r.invalid_block_ids]
    assert len(bad) == 1
    assert e.pending() == {}


def test_a_hung_lookup_costs_hits_and_nothing_else(engine, world: World, monkeypatch) -> None:
    """B56: the step goes on, the request is recomputed, later lookups are misses at once."""
    from ucm_vllm import lookup

    monkeypatch.setattr(lookup, "INLINE_WAIT_S", 0.001)
    tokens = prompt(6, 200)
    wanted = engine().generate("a", tokens)
    e = engine()
    service = e.connector._sched._lookups
    service._timeout_s = 0.05
    release = threading.Event()
    monkeypatch.setattr(
        e.connector.deployment_store(), "lookup", lambda ids: (release.wait(20), 1)[1]
    )
    assert e.generate("b", tokens, max_tokens=4) == wanted
    assert e.counted["lookup_failures|timeout"] == 1
    assert e.generate("c", prompt(7, 200)) is not None
    assert e.counted["lookup_failures|stuck"] >= 1
    release.set()
    monkeypatch.undo()
    service._stuck.done.wait(5)
    other = prompt(6, 200)
    e.scheduler.reset_prefix_cache()
    assert e.generate("d", other) == wanted
    assert e.counted["hit_tokens"] == 192


def test_a_lookup_that_raises_is_a_counted_miss(engine, world: World, monkeypatch) -> None:
    e = engine()

    def broken(ids: np.ndarray) -> np.ndarray:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(e.connector.deployment_store(), "lookup", broken)
    e.generate("a", prompt(8, 200))
    assert e.counted["lookup_failures|OSError"] == 1
