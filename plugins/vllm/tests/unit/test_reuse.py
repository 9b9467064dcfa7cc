"""What is saved by one engine is used by another, and the page contents are right at every step.

The scripted model checks every byte of every computed position before each step, so each of these tests
also shows that nothing was loaded into a wrong place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripted_engine import World, prompt
from ucm_core.coordinator import plan_lookup
from ucm_core.store.contract import Status


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("mla", [False, True])
def test_second_engine_loads_what_the_first_saved(engine, world, block_size, mla) -> None:
    # Pages of the CPU kernels cannot be cut, so every block here divides the stored block.
    if block_size == 16 and not mla:
        pytest.skip("the CPU backend has no blocks of 16 tokens")
    tokens = prompt(1, 300)
    first = engine(block_size=block_size, mla=mla)
    wanted = first.generate("a", tokens)
    assert first.counted["save_blocks"] == 4
    assert "hit_tokens" not in first.counted
    second = engine(block_size=block_size, mla=mla)
    assert second.generate("b", tokens) == wanted
    assert second.counted["hit_tokens"] == 256
    assert second.counted["load_blocks"] == 4
    assert "save_blocks" not in second.counted
    assert first.pending() == {}
    assert second.pending() == {}
    assert "anomalies" not in second.counted


def test_blocks_of_128_choose_a_stored_block_that_fits(engine, world: World) -> None:
    tokens = prompt(1, 300)
    wanted = engine(block_size=128).generate("a", tokens)
    second = engine(block_size=128)
    assert second.grid_tokens() == 128
    assert second.generate("b", tokens) == wanted
    assert second.counted["hit_tokens"] == 256


def test_blocks_of_128_of_plain_rows_are_sliced(engine, world: World) -> None:
    tokens = prompt(1, 300)
    wanted = engine(block_size=128, mla=True).generate("a", tokens)
    second = engine(block_size=128, mla=True)
    assert second.grid_tokens() == 64
    assert second.generate("b", tokens) == wanted
    assert second.counted["hit_tokens"] == 256


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("local", [True, False])
def test_a_token_is_always_left_to_compute(engine, length: int, local: bool) -> None:
    """B11: the whole prompt is stored; one token at least remains, on every start."""
    tokens = prompt(2, length)
    first = engine(enable_prefix_caching=local)
    wanted = first.generate("a", tokens)
    assert first.generate("again", tokens) == wanted
    second = engine(enable_prefix_caching=local)
    assert second.generate("b", tokens) == wanted
    # Whole stored blocks, and of the last one what leaves a token and ends on a block of vLLM.
    wanted_hit = min(length // 64 * 64, (length - 1) // 32 * 32)
    assert second.counted.get("hit_tokens", 0) == wanted_hit
    assert second.generate("c", tokens) == wanted


@pytest.mark.parametrize(
    ("tail", "wanted_hit"), [(1, 224), (32, 224), (33, 192), (70, 160), (256, 0)]
)
def test_the_operator_chooses_the_tail_that_is_computed(
    engine, world: World, tail: int, wanted_hit: int
) -> None:
    """B11: of a prompt that is stored whole at least ``tail`` tokens are computed, in vLLM's blocks of 32."""
    tokens = prompt(2, 256)
    wanted = engine().generate("a", tokens)
    world.settings["recompute_tail_tokens"] = tail
    second = engine()
    assert second.generate("b", tokens) == wanted
    assert second.counted.get("hit_tokens", 0) == wanted_hit


@pytest.mark.parametrize("stored", [0, 64, 128, 192, 256])
@pytest.mark.parametrize("local", [0, 32, 64, 96, 128, 160, 192])
def test_external_hit_beside_a_partial_local_hit(engine, stored: int, local: int) -> None:
    """The local hit may end inside a stored block: those pages are others' and are not written."""
    tokens = prompt(3, 250)
    if stored:
        # The last block only becomes whole with the tokens the request generates.
        engine().generate("seed", tokens[:stored], max_tokens=1)
    wanted = engine(kv_role="kv_consumer").generate("cold", tokens)
    second = engine()
    if local:
        # Compute the local prefix without help: its keys are withheld from this engine for a moment.
        objects, second.world.objects = dict(second.world.objects), second.world.objects
        second.world.objects.clear()
        second.generate("local", [*tokens[:local], 5], max_tokens=1)
        second.world.objects.clear()
        second.world.objects.update(objects)
    before = second.counted.get("hit_tokens", 0)
    assert second.generate("b", tokens) == wanted
    external = second.counted.get("hit_tokens", 0) - before
    assert external == max(0, min(stored, 192) - local)
    assert second.pending() == {}


def test_decoded_tokens_are_saved_and_found(engine) -> None:
    tokens = prompt(4, 100)
    first = engine()
    answer = first.generate("a", tokens, max_tokens=60)
    assert first.counted["save_blocks"] == 2
    second = engine()
    longer = tokens + answer + prompt(5, 10)
    second.generate("b", longer, max_tokens=2)
    assert second.counted["hit_tokens"] == 128


def test_two_requests_of_one_prefix_save_it_once(engine) -> None:
    first = engine(enable_prefix_caching=False, max_num_batched_tokens=512)
    tokens = prompt(7, 200)
    first.add("a", tokens)
    first.add("b", tokens)
    first.run()
    assert first.counted["save_blocks"] == 3


def test_blocks_that_were_lost_are_saved_again_from_a_local_hit(engine) -> None:
    first = engine()
    tokens = prompt(8, 200)
    first.generate("a", tokens)
    first.world.objects.clear()
    first.generate("b", tokens)
    assert len(first.world.objects) == 3


def test_a_request_that_polls_asks_the_store_once(engine) -> None:
    """B04 of the engine traps: the scheduler polls a waiting request every step."""
    first = engine(max_num_seqs=1)
    first.add("runs", prompt(9, 40), max_tokens=50)
    first.step()
    asked = first.connector.deployment_store().lookups
    first.add("waits", prompt(10, 200))
    request = first.scheduler.requests["waits"]
    for _ in range(50):
        assert first.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert first.connector.deployment_store().lookups == asked + 1
    first.run()


def test_copies_that_have_begun_end_before_the_worker_does(engine, world: World) -> None:
    """A server that is stopped right after its last answer keeps what that answer computed."""
    world.auto = False
    e = engine()
    e.add("a", prompt(1, 130), max_tokens=1)
    for _ in range(50):
        e.step()
        if e.store.tasks:
            break
    (save,) = e.store.tasks
    assert not save.check()
    e.ranks[0].worker.shutdown()
    assert [Status(int(one)) for one in save.results] == [Status.OK] * len(save.results)
    assert all(wait is not None and wait <= 1.0 for wait in e.store.waits)


def test_consumer_saves_nothing_and_producer_loads_nothing(engine) -> None:
    tokens = prompt(11, 200)
    consumer = engine(kv_role="kv_consumer")
    wanted = consumer.generate("a", tokens)
    assert consumer.world.objects == {}
    producer = engine(kv_role="kv_producer")
    assert producer.generate("b", tokens) == wanted
    assert len(producer.world.objects) == 3
    again = engine(kv_role="kv_producer")
    assert again.generate("c", tokens) == wanted
    assert "hit_tokens" not in again.counted
    assert "save_blocks" not in again.counted


def test_short_requests_are_left_alone(engine, world: World) -> None:
    world.settings["persist_token_threshold"] = 150
    first = engine()
    first.generate("short", prompt(12, 149))
    assert world.objects == {}
    assert first.counted["uncacheable_requests|short"] == 1
    first.generate("long", prompt(12, 150))
    assert len(world.objects) == 2


def test_lite_looks_up_and_moves_nothing(engine, world: World) -> None:
    tokens = prompt(13, 200)
    wanted = engine().generate("a", tokens)
    world.settings["use_lite"] = True
    lite = engine()
    assert lite.generate("b", tokens) == wanted
    assert lite.counted["requests"] == 1
    assert "hit_tokens" not in lite.counted


@pytest.mark.parametrize("windows", [(None, None), (96, None)], ids=["one group", "two groups"])
def test_scheduler_and_worker_name_the_same_objects(
    engine_over, tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    """B43: the ids the scheduler asks for are the ids the worker writes, whatever is left unset."""
    world = World(tmp_path, windows=windows)
    rows = len(set(windows))
    tokens = prompt(14, 200)
    everything = {"block_tokens": 64, "head_slices": 2, "namespace": "two", "timeout_ms": 9_000}
    some = [{k: v for k, v in everything.items() if k != left_out} for left_out in everything]
    for number, given in enumerate([{}, everything, *some]):
        world.objects.clear()
        world.settings = {"model_id": "scripted", **given}
        if "namespace" in given:
            world.settings["namespace"] = f"case-{number}"
        first = engine_over(world, enable_prefix_caching=False)
        first.generate("a", tokens)
        written = set(world.objects)
        asked: set[bytes] = set()
        side = first.connector._sched
        plan = plan_lookup(side._placement.keys, first.chain_of(tokens), store_of=side._store_of)
        for ids in plan.ids.values():
            asked |= {bytes(i) for i in ids}
        assert asked == written
        assert len(written) == 3 * rows * given.get("head_slices", 1)


def test_reset_makes_old_content_invisible_to_this_process_only(engine) -> None:
    tokens = prompt(15, 200)
    first = engine()
    wanted = first.generate("a", tokens)
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    assert first.generate("b", tokens) == wanted
    assert "hit_tokens" not in first.counted
    assert len(first.world.objects) == 6
    other = engine()
    assert other.generate("c", tokens) == wanted
    assert other.counted["hit_tokens"] == 192
