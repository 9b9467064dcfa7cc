"""Models with recurrent states beside attention: vLLM's real scheduler, and a state that depends on every
token before it. The scripted model checks the state it continues from, in every layer and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.model_executor.models.utils import extract_layer_index

from scripted_engine import BESIDE, STATE, ScriptedEngine, World, prompt
from ucm_core.errors import UnsupportedError
from ucm_core.identity import Manifest, ModelIdentity
from ucm_core.spec import Kind
from ucm_core.store.contract import Status
from ucm_vllm.facts import Facts, read_facts
from ucm_vllm.placement import Placement
from ucm_vllm.states import asked_positions, offered_states, states_to_save

Build = Callable[..., ScriptedEngine]
#: Three state groups of one layer and a full one, as vLLM groups them.
MIXED = (STATE, STATE, STATE, None)
BLOCK = 64


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, windows=MIXED)


@pytest.fixture
def hybrid(engine: Build) -> Build:
    """Chunks of 128 tokens: vLLM keeps a state at the end of each."""

    def build(**kw: object) -> ScriptedEngine:
        return engine(**{"block_size": BLOCK, "max_num_batched_tokens": 128, **kw})

    return build


def _state_key(e: ScriptedEngine, tokens: list[int], position: int, rank: int = 0) -> bytes:
    (place,) = e.connector._deployment.placement.states
    at = e.connector._deployment.placement.keys.of(place.row.name)[rank]
    return bytes(e.chain_of(tokens).snapshot_ids(at.seed, [position])[0])


def _block_key(e: ScriptedEngine, tokens: list[int], block: int) -> bytes:
    placement = e.connector._deployment.placement
    (at,) = placement.keys.of(placement.rows[0].row.name)
    return bytes(e.chain_of(tokens).object_ids(at.seed)[block])


def test_rows_and_objects(hybrid: Build, world: World) -> None:
    """One row for all state layers, whatever groups vLLM made; one object per boundary."""
    e = hybrid()
    assert len(e.kv.kv_cache_groups) == 4
    placement = e.connector._deployment.placement
    (place,) = placement.states
    assert place.row.layers == (0, 1, 2)
    assert len(place.tables) == 3
    tokens = prompt(1, 300)
    e.generate("a", tokens)
    wanted = {_state_key(e, tokens, at) for at in (128, 256)}
    wanted |= {_block_key(e, tokens, i) for i in range(4)}
    assert set(world.objects) == wanted
    e.check_idle()


@pytest.mark.parametrize(
    ("length", "hit"), [(300, 256), (257, 256), (256, 192), (130, 128), (128, 64), (64, 0)]
)
def test_second_engine_hits_at_the_boundary(hybrid: Build, length: int, hit: int) -> None:
    """A prompt of a whole number of blocks leaves one token to compute: it starts a boundary earlier."""
    tokens = prompt(2, length)
    first = hybrid()
    wanted = first.generate("a", tokens)
    second = hybrid()
    assert second.generate("b", tokens) == wanted
    assert second.counted.get("hit_tokens", 0) == hit
    for e in (first, second):
        e.check_idle()


def test_a_shorter_prompt_cannot_use_a_deeper_state(hybrid: Build) -> None:
    """B09: the one state of 130 tokens is that at 128; 127 of them are computed."""
    tokens = prompt(2, 130)
    hybrid().generate("a", tokens)
    e = hybrid()
    e.generate("b", tokens[:127])
    assert e.counted.get("hit_tokens", 0) == 0
    e.generate("c", tokens)
    assert e.counted.get("hit_tokens", 0) == 128 - BLOCK, "the rest was in vLLM's own cache"


def test_a_longer_prompt_continues_from_the_deepest_common_boundary(hybrid: Build) -> None:
    shared = prompt(3, 390)
    hybrid().generate("a", shared)
    e = hybrid()
    e.generate("b", [*shared[:300], *prompt(4, 200)])
    assert e.counted["hit_tokens"] == 256
    e.generate("c", [*shared, *prompt(5, 100)])
    assert e.counted["hit_tokens"] == 256 + 384 - 256, "the rest was in vLLM's own cache"


@pytest.mark.parametrize(("gone", "hit"), [((256,), 128), ((128,), 256), ((128, 256), 0)])
def test_a_state_that_is_gone_moves_the_boundary(
    hybrid: Build, world: World, gone: tuple[int, ...], hit: int
) -> None:
    """B08: KV reaches deeper than the states; without a state it is worth nothing."""
    tokens = prompt(6, 300)
    first = hybrid()
    wanted = first.generate("a", tokens)
    for position in gone:
        del world.objects[_state_key(first, tokens, position)]
    e = hybrid()
    assert e.generate("b", tokens) == wanted
    assert e.counted.get("hit_tokens", 0) == hit
    assert all(_state_key(e, tokens, p) in world.objects for p in gone if p > hit), "stored anew"


def test_kv_that_is_gone_moves_the_boundary_too(hybrid: Build, world: World) -> None:
    tokens = prompt(7, 300)
    first = hybrid()
    wanted = first.generate("a", tokens)
    del world.objects[_block_key(first, tokens, 3)]
    e = hybrid()
    assert e.generate("b", tokens) == wanted
    assert e.counted["hit_tokens"] == 128


@pytest.mark.parametrize("status", [Status.CORRUPT, Status.MISS, Status.TIMEOUT])
@pytest.mark.parametrize("bad", ["state", "kv"])
def test_a_bad_load_of_one_group_starts_over_at_a_boundary_valid_in_all(
    hybrid: Build, world: World, bad: str, status: Status
) -> None:
    tokens = prompt(8, 300)
    first = hybrid()
    wanted = first.generate("a", tokens)
    key = _state_key(first, tokens, 256) if bad == "state" else _block_key(first, tokens, 2)
    e = hybrid()
    world.faults[key] = status
    assert e.generate("b", tokens) == wanted
    assert e.counted[f"load_failed_blocks|{status.name.lower()}"] == 1
    assert e.counted["hit_tokens"] == 128
    assert [r.failed_recving for r in e.reports if r.failed_recving] == [{"b"}]
    loads = [task for task in e.all_tasks() if task.kind == "load"]
    assert sum(key in task.ids for task in loads) == 1, "a bad key was offered again"
    e.check_idle()


def test_a_store_that_always_fails_costs_two_loads(hybrid: Build, world: World) -> None:
    tokens = prompt(9, 400)
    wanted = hybrid().generate("a", tokens)
    e = hybrid()
    world.faults.update(dict.fromkeys(world.objects, Status.IO_ERROR))
    assert e.generate("b", tokens) == wanted
    assert len([r for r in e.reports if r.failed_recving]) <= 2
    e.check_idle()


#: Steps in flight: none, and two that the worker runs as late as it may.
IN_FLIGHT = [pytest.param({}, id="one"), pytest.param({"depth": 2, "lagging": True}, id="two")]


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("copied_in_time", [True, False])
def test_a_state_is_copied_before_its_block_is_given_away(
    hybrid: Build, world: World, copied_in_time: bool, in_flight: dict[str, object]
) -> None:
    """vLLM keeps only the last states of a running prompt. A slow store's copies are waited for; what
    is not copied then is not stored, and never a later state under its key."""
    world.auto = False
    # 44 blocks are used over time, 29 there are.
    e = hybrid(blocks=30, max_num_seqs=1, **in_flight)
    for store in e.stores:
        store.copy_when_waited = copied_in_time
    tokens = prompt(10, 700)
    e.add("a", tokens, max_tokens=2)
    for _ in range(40):
        e.step()
        if "a" in e.finished:
            break
    assert "a" in e.finished
    for _ in range(5):
        for task in e.all_tasks():
            task.run()
            task.finish()
        e.step()
    e.run()
    e.check_idle()
    stored = [at for at in range(128, 700, 128) if _state_key(e, tokens, at) in world.objects]
    every = [128, 256, 384, 512, 640]
    assert stored == every if copied_in_time else set(stored) < set(every)
    world.auto = True
    hybrid(blocks=64).generate("check", tokens)  # every state that is loaded is checked


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_many_requests_preemption_and_aborts(hybrid: Build, in_flight: dict[str, object]) -> None:
    e = hybrid(blocks=44, max_num_batched_tokens=256, **in_flight)
    prompts = {f"r{i}": [*prompt(11, 200), *prompt(20 + i, 150)] for i in range(6)}
    requests = [e.add(name, tokens, max_tokens=120) for name, tokens in prompts.items()]
    for _ in range(6):
        e.step()
    e.abort("r1")
    e.run()
    assert any(request.num_preemptions for request in requests)
    again = hybrid(blocks=60, max_num_batched_tokens=256)
    for name in ("r0", "r5"):
        assert again.generate(name, prompts[name], max_tokens=120) == e.outputs[name]
    for one in (e, again):
        one.check_idle()


@pytest.mark.parametrize("first", [0, 4])
def test_a_layer_may_have_a_state_beside_kv(hybrid: Build, first: int) -> None:
    """Attention and a recurrence side by side in one layer, and a layer with neither. vLLM may give the
    states numbers of their own, after those of all layers."""
    e = hybrid()
    groups = []
    for group in e.kv.kv_cache_groups:
        (name,) = group.layer_names
        number = extract_layer_index(name)
        name = f"model.{first + number}.mixer" if number < 3 else "model.layers.0.self_attn.attn"
        groups.append(replace(group, layer_names=[name]))
    facts = read_facts(e.config, replace(e.kv, kv_cache_groups=groups))
    identity = ModelIdentity(weights="id:x", kv_dtype="fp32")
    placement = Placement.build(facts, identity, Manifest("n", 64, 1), "fp32")
    kinds = {row.layers: row.kind for row in placement.table.rows}
    assert kinds == {(0,): Kind.CHAIN, (0, 1, 2): Kind.SNAPSHOT, (3,): Kind.NONE}
    assert [at.coordinate.layers for at in placement.of_rank(0, 0)] == [(0,), (0, 1, 2)]


def test_only_what_vllm_offers_is_saved(hybrid: Build) -> None:
    """B09: 130 tokens, list [null, s128, running, draft, draft, draft]. The one snapshot is what vLLM
    names, from the block it names; places in the list play no part."""
    e = hybrid()
    (place,) = e.connector._deployment.placement.states
    chain = e.chain_of(prompt(12, 130))
    a, b, c = place.tables
    offers = [(a, 17, 128), (b, 18, 128), (c, 19, 128), (a, 20, 130), (b, 0, 64), (a, 5, 64)]
    found = offered_states(place, offers)
    assert found == {128: [17, 18, 19]}, "off the grid, null, or not of every group"
    part = states_to_save(place, chain, found)
    assert part.blocks.tolist() == [1]
    assert part.pages[:, :, 0].tolist() == [[17, 18, 19]]
    assert bytes(part.links[0]) == bytes(chain.links[1])


def test_positions_asked_are_bounded_and_end_deep() -> None:
    few = asked_positions(300, 64)
    assert few.tolist() == [64, 128, 192, 256]
    many = asked_positions(1_000_000, 64)
    assert len(many) <= 1024
    assert many[-512:].tolist() == list(range(1_000_000 - 511 * 64, 1_000_001, 64))
    assert (np.diff(many) > 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state_mode": "none"}, "mamba_cache_mode='none'"),
        ({"windows": (STATE, STATE)}, "recurrent states alone"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    world = World(tmp_path, **{"windows": MIXED, **changes})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=words):
        ScriptedEngine(world, block_size=BLOCK)


@pytest.mark.parametrize("mode", ["auto", "save"])
def test_two_ranks_hold_a_part_of_every_state_each(hybrid: Build, world: World, mode: str) -> None:
    """Every part counts: without one rank's there is no state, and one that is bad starts both over."""
    world.settings["use_layerwise"] = mode
    tokens = prompt(15, 300)
    first = hybrid(tp=2)
    wanted = first.generate("a", tokens)
    # Per rank two states and four blocks: nothing is written twice.
    assert len(world.objects) == 2 * (2 + 4)
    second = hybrid(tp=2)
    assert second.generate("b", tokens) == wanted
    assert second.counted["hit_tokens"] == 256

    del world.objects[_state_key(first, tokens, 256, rank=1)]
    third = hybrid(tp=2)
    assert third.generate("c", tokens) == wanted
    assert third.counted["hit_tokens"] == 128
    assert _state_key(first, tokens, 256, rank=1) in world.objects, "it was not stored anew"

    world.faults[_state_key(first, tokens, 256, rank=1)] = Status.CORRUPT
    fourth = hybrid(tp=2)
    assert fourth.generate("d", tokens) == wanted
    assert fourth.counted["load_failed_blocks|corrupt"] == 1
    assert fourth.counted["hit_tokens"] == 128
    for e in (first, second, third, fourth):
        e.check_idle()


def test_another_number_of_ranks_is_a_clean_miss(hybrid: Build) -> None:
    """A part of a state is neither joined with others nor cut, also where the heads of KV could be."""
    tokens = prompt(16, 300)
    alone, two = hybrid(), hybrid(tp=2)
    wanted = alone.generate("a", tokens)
    assert two.generate("b", tokens) == wanted
    assert two.counted.get("hit_tokens", 0) == 0
    again = hybrid()
    assert again.generate("c", tokens) == wanted
    assert again.counted["hit_tokens"] == 256


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("layers", [MIXED, (BESIDE, STATE, BESIDE)], ids=["apart", "beside"])
def test_saves_layer_by_layer_take_states_when_the_pass_is_over(
    tmp_path: Path, engine_over: Build, layers: tuple[Any, ...], in_flight: dict[str, object]
) -> None:
    """Attention layers go as their calls come. A state is written after them, also where one layer has
    both: taken at a call, it would be the one of the step before."""
    sizes = {"block_size": BLOCK, "max_num_batched_tokens": 128, **in_flight}
    tokens = prompt(14, 300)
    stored = []
    for mode in ("save", "auto"):
        (tmp_path / mode).mkdir()
        world = World(tmp_path / mode, windows=layers)
        world.settings["use_layerwise"] = mode
        first = engine_over(world, **sizes)
        wanted = first.generate("a", tokens)
        kv = sum(layer != STATE for layer in layers)
        states = sum(layer is not None for layer in layers)
        dumped = {tuple(sorted(set(t.shards))) for t in first.all_tasks() if t.kind == "dump"}
        by_layer = {(i,) for i in range(kv)} if mode == "save" else {tuple(range(kv))}
        assert dumped == by_layer | {tuple(range(states))}
        second = engine_over(world, **sizes)
        assert second.generate("b", tokens) == wanted
        assert second.counted["hit_tokens"] == 256
        for e in (first, second):
            e.check_idle()
        stored.append(world.objects)
    assert stored[0] == stored[1]


@pytest.fixture
def of_stage(tmp_path: Path, engine_over: Build) -> Callable[[range, list[str]], Facts]:
    """The facts of one of two pipeline stages, whose process sees its own layers only."""
    (tmp_path / "staged").mkdir()
    layers = (BESIDE, STATE, None, BESIDE)
    e = engine_over(World(tmp_path / "staged", windows=layers), block_size=BLOCK)
    e.config.parallel_config.pipeline_parallel_size = 2

    def of(stage: range, types: list[str]) -> Facts:
        e.config.model_config.hf_text_config.layers_block_type = types
        groups = [
            replace(
                group,
                layer_names=[
                    n for n in group.layer_names if extract_layer_index(n) % len(layers) in stage
                ],
            )
            for group in e.kv.kv_cache_groups
        ]
        return read_facts(e.config, replace(e.kv, kv_cache_groups=groups))

    return of


TYPES = ["hybrid", "mamba", "attention", "hybrid"]


def test_every_pipeline_stage_sees_the_same_rows(of_stage: Callable[..., Facts]) -> None:
    """Each process is told the layers of its own stage; the model's configuration tells the others."""
    identity = ModelIdentity(weights="id:x", kv_dtype="fp32")
    stages = [of_stage(layers, TYPES) for layers in (range(2), range(2, 4))]
    a, b = (Placement.build(facts, identity, Manifest("n", 64, 1), "fp32") for facts in stages)
    assert a.table.rows == b.table.rows
    assert [at.seed for at in a.all()] == [at.seed for at in b.all()]
    layers = [[at.coordinate.layers for at in p.of_rank(s, 0)] for s, p in enumerate((a, b))]
    assert layers == [[(0,), (0, 1)], [(2, 3), (3,)]]


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ([*TYPES[:3], "conv"], "conv"),
        (TYPES[:3], "3 of 4 layers"),
        (["mamba", *TYPES[1:]], "not what layer_types"),
        (["attention", *TYPES[1:]], "not what layer_types"),
    ],
)
def test_pipeline_stages_that_cannot_be_told_are_refused(
    of_stage: Callable[..., Facts], types: list[str], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        of_stage(range(2), types)


def test_the_engines_retention_decides_what_is_offered(tmp_path: Path) -> None:
    """Interval 0, vLLM's default: of a long prompt only the state at its last boundary is kept."""
    world = World(tmp_path, windows=MIXED, interval=0)
    e = ScriptedEngine(world, block_size=BLOCK, max_num_batched_tokens=128, blocks=64)
    tokens = prompt(13, 400)
    e.generate("a", tokens)
    stored = [at for at in range(64, 400, 64) if _state_key(e, tokens, at) in world.objects]
    e.close()
    assert stored == [384]
