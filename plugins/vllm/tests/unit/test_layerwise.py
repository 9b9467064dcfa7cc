"""Loads overlapped with compute and saves layer by layer: right bytes at every layer, nothing forgotten,
and nothing that was computed on a bad load is ever published.

The scripted model checks a layer's bytes right before that layer computes; in the tests of bad loads it
computes wrongly on wrong bytes, on all ranks, as a real one does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripted_engine import ScriptedEngine, World, expected, prompt
from ucm_core.errors import UnsupportedError
from ucm_core.store.contract import Status
from ucm_vllm.connector import UCMConnector
from ucm_vllm.modes import Modes, check_modes, choose_modes

Build = Callable[..., ScriptedEngine]
LAYERS = 4


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, windows=[None] * LAYERS)
    world.settings["use_layerwise"] = True
    return world


def _mode(world: World, choice: Any) -> None:
    world.settings["use_layerwise"] = choice


def _keys(engine: ScriptedEngine, tokens: list[int], rank: int = 0) -> list[bytes]:
    """Ids of a prompt's blocks on a rank, whose heads are one slice."""
    seed = engine.connector._deployment.placement.all()[rank].seed
    return [bytes(key) for key in engine.chain_of(tokens).object_ids(seed)]


# -- modes -------------------------------------------------------------------------------------------------


def test_every_mode_stores_and_loads_the_same_objects(engine: Build, world: World) -> None:
    tokens = prompt(1, 300)
    stored = []
    for choice in (True, "save", False, "auto"):
        _mode(world, choice)
        world.objects.clear()
        first = engine()
        wanted = first.generate("a", tokens)
        assert wanted == expected(tokens, 4)
        stored.append(dict(world.objects))
        assert len(world.objects) == 4
        for other in (True, "save", False):
            _mode(world, other)
            second = engine()
            assert second.generate("b", tokens) == wanted
            assert second.counted["hit_tokens"] == 256
            assert second.counted["load_blocks"] == 4
            second.check_idle()
        first.check_idle()
    assert all(one == stored[0] for one in stored)


def test_layerwise_loads_run_in_the_step_that_brings_them(engine: Build, world: World) -> None:
    tokens = prompt(2, 300)
    engine().generate("seed", tokens)
    e = engine()
    request = e.add("a", tokens, max_tokens=1)
    assert e.connector.get_num_new_matched_tokens(request, 0) == (256, False)
    e.step()
    assert "a" in e.finished
    loads = [task for task in e.all_tasks() if task.kind == "load"]
    assert [set(task.shards) for task in loads] == [{i} for i in range(LAYERS)]
    e.run()


def test_a_layer_is_waited_for_before_it_computes(engine: Build, world: World) -> None:
    """The store delivers only when it is waited for; the model checks each layer when it computes."""
    tokens = prompt(3, 300)
    engine().generate("seed", tokens)
    world.auto = False
    e = engine()
    e.add("a", tokens, max_tokens=1)
    e.step()
    assert e.outputs["a"] == expected(tokens, 1)
    waits = [w for store in e.stores for w in store.waits]
    assert waits.count(None) == LAYERS, "one bounded wait a layer, by the store's own deadline"


def test_saves_start_layer_by_layer_in_order(engine: Build, world: World) -> None:
    _mode(world, "save")
    e = engine(max_num_batched_tokens=512)
    e.generate("a", prompt(4, 300), max_tokens=1)
    dumps = [task for task in e.all_tasks() if task.kind == "dump"]
    assert [set(task.shards) for task in dumps] == [{i} for i in range(LAYERS)]
    e.check_idle()


def test_several_groups_save_layer_by_layer(tmp_path: Path) -> None:
    (tmp_path / "groups").mkdir()
    world = World(tmp_path / "groups", windows=(96, None, 96, None))
    world.settings["use_layerwise"] = "save"
    tokens = prompt(5, 600)
    engines = [ScriptedEngine(world, blocks=128, max_num_batched_tokens=192) for _ in range(2)]
    wanted = engines[0].generate("a", tokens)
    assert engines[1].generate("b", tokens) == wanted == expected(tokens, 4)
    assert engines[1].counted["hit_tokens"] == 576
    for e in engines:
        e.check_idle()
        e.close()


@pytest.mark.parametrize(
    ("windows", "words"),
    [((96, None), "2 KV cache groups"), ((96, 96), "sliding window everywhere")],
)
def test_models_that_cannot_load_layer_by_layer_are_refused(
    tmp_path: Path, windows: tuple[int | None, ...], words: str
) -> None:
    world = World(tmp_path, windows=windows)
    world.settings["use_layerwise"] = True
    with pytest.raises(UnsupportedError, match=words):
        ScriptedEngine(world)
    world.settings["use_layerwise"] = "save"
    ScriptedEngine(world).close()


def test_engines_that_cannot_load_layer_by_layer_are_refused(engine: Build, world: World) -> None:
    e = engine()
    facts, config = e.connector._deployment.facts, e.config
    layered = choose_modes(True)
    check_modes(layered, facts, config)
    config.scheduler_config.async_scheduling = True
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.enable_dbo = True
    with pytest.raises(UnsupportedError) as refused:
        check_modes(layered, facts, config)
    for words in ("--no-async-scheduling", "pipeline_parallel_size=2", "micro-batch"):
        assert words in str(refused.value)
    with pytest.raises(UnsupportedError, match="micro-batch"):
        check_modes(choose_modes("save"), facts, config)
    check_modes(choose_modes("auto"), facts, config)


def test_a_step_that_loads_and_verifies_drafts_has_room_for_both(
    engine: Build, world: World
) -> None:
    """B11: loads by layer come in a step that also schedules drafts, so drafts + 2 tokens are left."""
    tokens = prompt(1, 130)
    wanted = engine().generate("a", tokens)
    plain = engine()
    assert plain.generate("b", tokens) == wanted
    assert plain.counted["hit_tokens"] == 128
    drafting = engine(drafts=3)
    assert drafting.generate("c", tokens) == wanted
    assert drafting.counted["hit_tokens"] == 96
    _mode(world, "auto")
    before = engine(drafts=3)
    assert before.generate("d", tokens) == wanted
    assert before.counted["hit_tokens"] == 128


@pytest.mark.parametrize(("choice", "answer"), [(True, True), ("save", False), ("auto", False)])
def test_piecewise_graphs_are_demanded_where_loads_hang_on_layers(
    choice: Any, answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {
        "ucm_connector_name": "UcmPipelineStore",
        "ucm_connector_config": {"store_pipeline": "Fake"},
    }
    inline = {"use_layerwise": choice, "ucm_connectors": [store]}
    assert UCMConnector.requires_piecewise_for_cudagraph(inline) is answer
    file = tmp_path / "ucm.yaml"
    file.write_text(
        f"use_layerwise: {str(choice).lower()}\nucm_connectors:\n"
        "  - ucm_connector_name: UcmPipelineStore\n"
        "    ucm_connector_config:\n      store_pipeline: Fake\n"
    )
    named = {"UCM_CONFIG_FILE": str(file)}
    assert UCMConnector.requires_piecewise_for_cudagraph(named) is answer
    monkeypatch.setenv("UCM_CONFIG_FILE", str(file))
    assert UCMConnector.requires_piecewise_for_cudagraph({}) is answer


# -- calls that do not come ------------------------------------------------------------------------------


def test_layers_whose_save_call_did_not_come_are_saved_at_the_end(
    engine: Build, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine()
    calls = e.worker.save_kv_layer

    def some(name: str, *arguments: Any, **options: Any) -> None:
        for _ in range(3 if ".1." in name else 0):
            calls(name, *arguments, **options)

    monkeypatch.setattr(e.worker, "save_kv_layer", some)
    tokens = prompt(6, 200)
    e.generate("a", tokens, max_tokens=1)
    dumps = [sorted(set(task.shards)) for task in e.all_tasks() if task.kind == "dump"]
    assert dumps == [[1], [0], [2, 3]]
    second = engine()
    assert second.generate("b", tokens) == expected(tokens, 4)
    assert second.counted["hit_tokens"] == 192


def test_a_layer_that_computes_without_waiting_costs_the_hit_not_the_answer(
    engine: Build, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph replayed whole skips the calls: what was computed is thrown away."""
    tokens = prompt(7, 300)
    engine().generate("seed", tokens)
    world.auto = False
    e = engine(check_bytes=False)
    calls = e.worker.wait_for_layer_load
    monkeypatch.setattr(
        e.worker, "wait_for_layer_load", lambda name: None if ".2." in name else calls(name)
    )
    e.add("a", tokens)
    _pump(e)
    assert e.outputs["a"] == expected(tokens, 4)
    assert e.counted["load_failed_blocks|cancelled"] == 4
    e.check_idle()


# -- bad loads ---------------------------------------------------------------------------------------------


def _pump(e: ScriptedEngine) -> None:
    """Steps, with the store doing its work between them."""
    for _ in range(300):
        for task in e.all_tasks():
            task.run()
            task.finish()
        if not e.scheduler.has_requests():
            return
        e.step()
    raise AssertionError(f"does not come to an end: {e.pending()}")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bad", [0, 2])
def test_nothing_computed_from_a_bad_load_is_published(
    engine: Build, world: World, tp: int, bad: int
) -> None:
    """Only the last rank's file is corrupt. A third process must get right tokens from what was saved."""
    shared, tail = prompt(8, 256), prompt(9, 200)
    engine(tp=tp).generate("seed", shared, max_tokens=1)
    assert len(world.objects) == 4 * tp
    e = engine(tp=tp, max_num_batched_tokens=512, check_bytes=False)
    key = _keys(e, shared, tp - 1)[bad]
    world.faults[key] = Status.CORRUPT
    whole = shared + tail
    e.add("a", whole)
    e.step()
    assert e.counted["load_failed_blocks|corrupt"] == 1
    assert e.outputs.get("a", []) == [], "vLLM took a token computed from a bad load"
    assert len(world.objects) == 4 * tp, "something was published before all ranks had reported"
    del world.objects[key]  # as a store does with a corrupt object
    world.faults.clear()
    e.step()
    assert all(store.discarded for store in e.stores), "not every rank threw its blocks away"
    e.run()
    assert e.outputs["a"] == expected(whole, 4)
    e.check_idle()
    assert len(world.objects) == 7 * tp
    third = engine(tp=tp)
    assert third.generate("c", whole) == expected(whole, 4)
    assert third.counted["hit_tokens"] == 448


def test_negative_control_without_holding_back_wrong_bytes_are_served(
    engine: Build, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Modes, "held_back", False)
    shared, tail = prompt(8, 256), prompt(9, 200)
    engine(tp=2).generate("seed", shared, max_tokens=1)
    e = engine(tp=2, max_num_batched_tokens=512, check_bytes=False)
    world.faults[_keys(e, shared, 1)[2]] = Status.CORRUPT
    assert e.generate("a", shared + tail) == expected(shared + tail, 4)
    world.faults.clear()
    third = engine(tp=2)
    with pytest.raises(AssertionError, match="wrong bytes"):
        third.generate("c", shared + tail)


def test_a_request_that_shares_blocks_of_a_bad_load_publishes_nothing_either(
    engine: Build, world: World
) -> None:
    """vLLM lets a second request of the step share blocks that are still being loaded."""
    shared = prompt(10, 256)
    one, two = shared + prompt(11, 200), shared + prompt(12, 200)
    engine().generate("seed", shared, max_tokens=1)
    e = engine(max_num_batched_tokens=1024, check_bytes=False)
    key = _keys(e, shared)[1]
    world.faults[key] = Status.CORRUPT
    e.add("a", one)
    e.add("b", two)
    e.step()
    assert len(world.objects) == 4
    del world.objects[key]
    world.faults.clear()
    e.run()
    assert e.outputs["a"] == expected(one, 4)
    assert e.outputs["b"] == expected(two, 4)
    e.check_idle()
    third = engine()
    for tokens in (one, two):
        assert third.generate(f"c{tokens[-1]}", tokens) == expected(tokens, 4)


def test_what_was_held_back_is_released_when_the_engine_goes_idle(
    engine: Build, world: World
) -> None:
    """No request needs another step, but the last blocks do."""
    e = engine(max_num_batched_tokens=512)
    e.add("a", prompt(13, 300), max_tokens=1)
    e.step()
    assert "a" in e.finished
    assert world.objects == {}
    assert e.connector.has_pending_push_work()
    e.run()
    assert len(world.objects) == 4
    assert not e.connector.has_pending_push_work()
    e.check_idle()


def test_policy_fail_ends_the_request_and_publishes_nothing(engine: Build, world: World) -> None:
    shared = prompt(14, 256)
    engine().generate("seed", shared, max_tokens=1)
    e = engine(policy="fail", max_num_batched_tokens=512, check_bytes=False)
    world.faults[_keys(e, shared)[1]] = Status.CORRUPT
    e.add("a", shared + prompt(15, 200))
    e.run()
    assert str(e.finished["a"]) == "error"
    assert len(world.objects) == 4
    e.check_idle()


@pytest.mark.parametrize("seed", range(6))
def test_storm(engine: Build, world: World, seed: int) -> None:
    """Random arrivals over a store whose loads fail now and then; a process that checks every byte
    then loads all that was published."""
    rng = random.Random(seed)
    e = engine(
        blocks=48,
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([96, 256, 1024]),
        tp=1 + seed % 2,
        check_bytes=False,
    )
    prefixes = [prompt(i, 200) for i in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for step in range(150):
        if rng.random() < 0.3 and len(e.scheduler.requests) < 5:
            tokens = rng.choice(prefixes)[: rng.randint(60, 200)] + prompt(
                step + 50, rng.randint(1, 120)
            )
            asked[f"r{step}"] = (tokens, rng.randint(1, 20))
            e.add(f"r{step}", tokens, max_tokens=asked[f"r{step}"][1])
        if rng.random() < 0.05:
            e.scheduler.reset_prefix_cache()
        world.faults.clear()
        for key in list(world.objects):
            if rng.random() < 0.02:
                world.faults[key] = Status.CORRUPT
        before = set(world.objects)
        e.step()
        for key in before & set(world.faults):
            if rng.random() < 0.5:
                world.objects.pop(key, None)
    world.faults.clear()
    e.run(2000)
    e.check_idle()
    for name, (tokens, count) in asked.items():
        assert e.outputs[name] == expected(tokens, count), name
    check = engine(blocks=64, tp=1 + seed % 2, enable_prefix_caching=False)
    for name, (tokens, _) in asked.items():
        check.generate(name, tokens, max_tokens=1)
    assert check.counted["hit_tokens"] > 0
