"""Models whose layers keep different parts of the prefix: sliding windows beside full attention.

vLLM makes groups of equal numbers of layers, each with a block table, and takes back blocks that a
window has left behind while their request runs. The scripted model checks every byte that a token's
window still reads, in every layer, before each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.model_executor.models.utils import extract_layer_index

from scripted_engine import ScriptedEngine, World, prompt
from ucm_core.errors import UnsupportedError
from ucm_core.identity import Manifest, ModelIdentity
from ucm_core.store.contract import Status
from ucm_vllm.facts import Facts, read_facts
from ucm_vllm.placement import Placement

Build = Callable[..., ScriptedEngine]
#: Two sliding layers for a full one, as vLLM's three groups of two layers.
MIXED = (96, 96, None, 96, 96, None)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, windows=MIXED)


def _rows(engine: ScriptedEngine) -> dict[int | None, list[bytes]]:
    """Seeds of each row's coordinates, by window."""
    placement = engine.connector._deployment.placement
    found: dict[int | None, list[bytes]] = {}
    for at in placement.all():
        found.setdefault(at.row.window, []).append(at.seed)
    return found


def _keys(engine: ScriptedEngine, tokens: list[int], window: int | None) -> list[bytes]:
    """Ids of a prompt's blocks in the row of ``window``."""
    (seed,) = _rows(engine)[window]
    return [bytes(key) for key in engine.chain_of(tokens).object_ids(seed)]


def test_store_groups_do_not_follow_vllms(engine: Build, world: World) -> None:
    e = engine()
    assert len(e.kv.kv_cache_groups) == 3
    placement = e.connector._deployment.placement
    rows = {place.row.window: (place.row.layers, place.tables) for place in placement.rows}
    assert {window: layers for window, (layers, _) in rows.items()} == {
        96: (0, 1, 3, 4),
        None: (2, 5),
    }
    assert sorted(len(tables) for _, tables in rows.values()) == [1, 2]


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("length", [60, 64, 150, 300, 700])
def test_second_engine_loads_what_the_first_saved(
    engine: Build, world: World, block_size: int, length: int
) -> None:
    tokens = prompt(1, length)
    first = engine(block_size=block_size, blocks=128)
    wanted = first.generate("a", tokens)
    whole = length // 64
    assert first.counted.get("save_blocks", 0) == 2 * whole
    second = engine(block_size=block_size, blocks=128)
    assert second.generate("b", tokens) == wanted
    hit = min(whole * 64, (length - 1) // block_size * block_size)
    assert second.counted.get("hit_tokens", 0) == hit
    for e in (first, second):
        e.check_idle()


def test_only_what_a_window_reaches_is_loaded(engine: Build, world: World) -> None:
    tokens = prompt(2, 650)
    wanted = engine(blocks=128).generate("a", tokens)
    e = engine(blocks=128)
    assert e.generate("b", tokens) == wanted
    loaded: dict[bytes, int] = {}
    for task in e.all_tasks():
        if task.kind == "load":
            for key in dict.fromkeys(task.ids):
                loaded[key] = loaded.get(key, 0) + 1
    assert e.counted["hit_tokens"] == 640
    assert set(loaded) == {*_keys(e, tokens, None), *_keys(e, tokens, 96)[8:]}
    assert set(loaded.values()) == {1}


def test_a_hole_in_a_window_moves_the_boundary_for_all_groups(engine: Build, world: World) -> None:
    """Blocks of the window that no boundary needs may be gone; one that it needs costs the tokens
    after the deepest boundary that all groups can continue from."""
    tokens = prompt(3, 650)
    wanted = engine(blocks=128).generate("a", tokens)
    keys = _keys(engine(blocks=128), tokens, 96)
    for gone, hit in ((range(8), 640), ([8], 512), ([9], 576), ([7, 9], 448)):
        kept = dict(world.objects)
        for block in gone:
            del world.objects[keys[block]]
        e = engine(blocks=128)
        assert e.generate("b", tokens) == wanted
        assert e.counted.get("hit_tokens", 0) == hit, gone
        world.objects.update(kept)


def test_a_full_group_that_lags_behind_limits_the_hit(engine: Build, world: World) -> None:
    """B08: deep hit in one group, shallow in the other."""
    tokens = prompt(4, 650)
    wanted = engine(blocks=128).generate("a", tokens)
    for key in _keys(engine(blocks=128), tokens, None)[5:]:
        del world.objects[key]
    e = engine(blocks=128)
    assert e.generate("b", tokens) == wanted
    assert e.counted["hit_tokens"] == 320


@pytest.mark.parametrize("local", [32, 96, 160, 256, 288])
def test_external_hit_beside_a_local_hit(engine: Build, world: World, local: int) -> None:
    tokens = prompt(5, 450)
    wanted = engine(blocks=128).generate("a", tokens)
    e = engine(blocks=128)
    objects = dict(world.objects)
    world.objects.clear()
    e.generate("local", [*tokens[:local], 5], max_tokens=1)
    world.objects.clear()
    world.objects.update(objects)
    before = e.counted.get("hit_tokens", 0)
    assert e.generate("b", tokens) == wanted
    assert e.counted["hit_tokens"] - before == 448 - local
    e.check_idle()


@pytest.mark.parametrize("window", [96, None])
@pytest.mark.parametrize("status", [Status.CORRUPT, Status.MISS, Status.TIMEOUT])
def test_a_bad_block_in_one_group_starts_over_without_it(
    engine: Build, world: World, window: int | None, status: Status
) -> None:
    """vLLM can only start a request of several groups over; the second hit avoids the bad block."""
    tokens = prompt(6, 650)
    wanted = engine(blocks=128).generate("a", tokens)
    e = engine(blocks=128)
    world.faults[_keys(e, tokens, window)[9]] = status
    assert e.generate("b", tokens) == wanted
    assert e.counted[f"load_failed_blocks|{status.name.lower()}"] == 1
    loads = [task for task in e.all_tasks() if task.kind == "load"]
    assert len(loads) == 4  # two rows, twice
    assert sum(_keys(e, tokens, window)[9] in task.ids for task in loads) == 1
    assert e.counted["hit_tokens"] == 576
    assert not any(report.invalid_block_ids for report in e.reports)
    assert [r.failed_recving for r in e.reports if r.failed_recving] == [{"b"}]
    e.check_idle()


def test_a_store_that_always_fails_costs_two_loads_and_then_vllm_computes(
    engine: Build, world: World
) -> None:
    tokens = prompt(7, 650)
    wanted = engine(blocks=128).generate("a", tokens)
    e = engine(blocks=128)
    for key in list(world.objects):
        world.faults[key] = Status.IO_ERROR
    assert e.generate("b", tokens) == wanted
    assert len([task for task in e.all_tasks() if task.kind == "load"]) <= 4
    assert len([r for r in e.reports if r.failed_recving]) <= 2
    e.check_idle()


def test_policy_fail_ends_the_request_and_leaves_nothing(engine: Build, world: World) -> None:
    tokens = prompt(8, 450)
    engine(blocks=128).generate("a", tokens)
    e = engine(blocks=128, policy="fail")
    world.faults[_keys(e, tokens, 96)[6]] = Status.CORRUPT
    e.add("b", tokens)
    e.run()
    assert str(e.finished["b"]) == "error"
    e.check_idle()


@pytest.mark.parametrize("chunk", [64, 96, 256, 1024])
def test_prompts_in_chunks_save_every_block_before_its_window_moves_on(
    engine: Build, world: World, chunk: int
) -> None:
    tokens = prompt(9, 900)
    e = engine(blocks=160, max_num_batched_tokens=chunk)
    e.generate("a", tokens)
    assert len(world.objects) == 2 * 14
    again = engine(blocks=160, max_num_batched_tokens=chunk)
    again.generate("b", tokens)
    assert again.counted["hit_tokens"] == 896


def test_windows_shorter_than_a_block_lose_decoded_blocks_only(
    engine: Build, world: World, tmp_path: Path
) -> None:
    """While decoding, vLLM has null-mapped the start of a block before it is whole: it is abandoned."""
    (tmp_path / "short").mkdir()
    short = World(tmp_path / "short", windows=(32, None))
    e = ScriptedEngine(short, blocks=64)
    tokens = prompt(10, 70)
    answer = e.generate("a", tokens, max_tokens=150)
    full, windowed = _keys(e, tokens + answer[:-1], None), _keys(e, tokens + answer[:-1], 32)
    assert set(full[:3]) <= set(short.objects)
    assert windowed[0] in short.objects
    assert not set(windowed[1:]) & set(short.objects)
    again = ScriptedEngine(short, blocks=64)
    again.generate("b", tokens + answer + [7])
    assert again.counted["hit_tokens"] == 64
    for one in (e, again):
        one.check_idle()
        one.close()


@pytest.mark.parametrize("copied_in_time", [True, False])
def test_what_a_window_leaves_behind_is_copied_before_it_is_reused(
    engine: Build, world: World, copied_in_time: bool
) -> None:
    """B07: vLLM frees window blocks of a running prompt and gives them away in the same step. The
    slow store has not copied them: each key is absent or has the original bytes."""
    world.auto = False
    # 57 blocks are used over time, 39 there are.
    e = engine(blocks=40, max_num_batched_tokens=128, max_num_seqs=1, enable_prefix_caching=False)
    for store in e.stores:
        store.copy_when_waited = copied_in_time
    tokens = prompt(11, 600)
    e.add("a", tokens, max_tokens=2)
    for _ in range(40):
        e.step()
        if "a" in e.finished:
            break
    assert "a" in e.finished
    # The engine never waited for the store as a whole: only for sources that it needed back.
    waited = [w for store in e.stores for w in store.waits if w]
    assert waited
    for _ in range(5):
        for task in e.all_tasks():
            task.run()
            task.finish()
        e.step()
    e.run()
    e.check_idle()
    if not copied_in_time:
        assert e.counted["save_failed_blocks|timeout"] > 0
        assert len(world.objects) < 18
    else:
        assert len(world.objects) == 18
    world.auto = True
    check = engine(blocks=64)
    check.generate("check", tokens)  # every byte that is loaded is checked


def test_a_request_that_ends_gives_its_old_window_blocks_back_at_once(
    engine: Build, world: World
) -> None:
    """At the end vLLM holds only what is in the tables then: the rest must have been copied."""
    world.auto = False
    e = engine(blocks=40, max_num_batched_tokens=512, enable_prefix_caching=False)
    e.add("a", prompt(12, 400), max_tokens=1)
    e.step()
    assert "a" in e.finished
    meta = e.connector._sched._outbox.meta
    assert len(meta.reclaimed) == 1
    e.add("b", prompt(13, 300), max_tokens=1)
    e.step()
    copied = [t for t in e.all_tasks() if t.kind == "dump" and t.check()]
    assert len(copied) == 1, "only the windowed row had to be waited for"
    for _ in range(4):
        for task in e.all_tasks():
            task.run()
            task.finish()
        e.step()
    e.run()
    e.check_idle()
    world.auto = True
    check = engine(blocks=64)
    for seed, length in ((12, 400), (13, 300)):
        check.generate(f"check{seed}", prompt(seed, length))
    assert check.counted["hit_tokens"] == 384 + 256


def test_a_window_alone_starts_over_too(tmp_path: Path) -> None:
    """One group, but truncating at a bad block would need tokens that no window block holds."""
    world = World(tmp_path, windows=(96, 96))
    tokens = prompt(14, 450)
    first = ScriptedEngine(world, blocks=64)
    wanted = first.generate("a", tokens)
    e = ScriptedEngine(world, blocks=64)
    world.faults[_keys(e, tokens, 96)[6]] = Status.CORRUPT
    assert e.generate("b", tokens) == wanted
    assert [r.failed_recving for r in e.reports if r.failed_recving] == [{"b"}]
    assert e.counted["hit_tokens"] == 384
    for one in (first, e):
        one.check_idle()
        one.close()


def _staged(e: ScriptedEngine, stage: range, types: list[str] | None) -> Facts:
    """The facts of one of two pipeline stages, whose process sees its own layers only."""
    e.config.parallel_config.pipeline_parallel_size = 2
    e.config.model_config.hf_text_config.layer_types = types
    groups = [
        replace(g, layer_names=[n for n in g.layer_names if extract_layer_index(n) in stage])
        for g in e.kv.kv_cache_groups
    ]
    return read_facts(e.config, replace(e.kv, kv_cache_groups=groups))


TYPES = ["full_attention" if window is None else "sliding_attention" for window in MIXED]


def test_every_pipeline_stage_sees_the_same_rows(engine: Build) -> None:
    """Each process is told the layers of its own stage; the model's configuration tells the others."""
    e = engine()
    first, second = (_staged(e, stage, TYPES) for stage in (range(3), range(3, 6)))
    assert first.kind_of == second.kind_of
    assert first.tables == second.tables
    assert sorted(first.table_of) == [0, 1, 2]
    assert sorted(second.table_of) == [3, 4, 5]
    identity = ModelIdentity(weights="id:x", kv_dtype="fp32")
    manifest = Manifest("n", 64, 1)
    a, b = (Placement.build(facts, identity, manifest, "fp32") for facts in (first, second))
    assert [place.tables for place in a.rows] == [place.tables for place in b.rows]
    layers = [[at.coordinate.layers for at in p.of_rank(s, 0)] for s, p in enumerate((a, b))]
    assert layers == [[(0, 1), (2,)], [(3, 4), (5,)]]


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (None, "0 of 6 layers"),
        (TYPES[:5], "5 of 6 layers"),
        ([*TYPES[:5], "chunked_attention"], "chunked_attention"),
        (TYPES[::-1], "not what layer_types"),
    ],
)
def test_pipeline_stages_that_cannot_be_told_are_refused(
    engine: Build, types: list[str] | None, words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        _staged(engine(), range(3), types)
