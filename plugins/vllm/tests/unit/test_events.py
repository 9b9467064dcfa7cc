"""KV events of the store as a consumer reads them from vLLM's own publisher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest

from scripted_engine import ScriptedEngine, World, prompt
from tiny_adapter import write_adapter
from ucm_core.store.contract import Status
from ucm_vllm import events as kv_events

STORAGE = "STORAGE"


def _config() -> KVEventsConfig:
    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


@pytest.fixture
def told(engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds engines with KV events on; their published batches are collected in ``.told``."""

    def build(**kw: Any) -> ScriptedEngine:
        e = engine(kv_events_config=_config(), **kw)
        e.told = []
        monkeypatch.setattr(
            e.scheduler.kv_event_publisher, "publish", lambda batch: e.told.extend(batch.events)
        )
        return e

    return build


def _ours(e: ScriptedEngine) -> list[Any]:
    return [event for event in e.told if getattr(event, "medium", None) == STORAGE]


def _vllms(e: ScriptedEngine, kind: type) -> list[Any]:
    return [event for event in e.told if isinstance(event, kind) and event.medium != STORAGE]


def _flat(events: list[Any]) -> list[Any]:
    return [h for event in events for h in event.block_hashes]


def test_stored_blocks_are_told_as_vllm_tells_its_own(told, world: World) -> None:
    e = told()
    e.generate("a", prompt(1, 200), max_tokens=60)
    ours = _ours(e)
    assert all(isinstance(event, BlockStored) for event in ours)
    vllms = {}
    for event in _vllms(e, BlockStored):
        for i, block in enumerate(event.block_hashes):
            parent = event.block_hashes[i - 1] if i else event.parent_block_hash
            vllms[block] = (parent, event.token_ids[i * 32 : (i + 1) * 32])
    assert len(_flat(ours)) == 8, "four stored blocks of two vLLM blocks each"
    for event in ours:
        assert (event.block_size, event.group_idx, event.lora_name) == (32, 0, None)
        for i, block in enumerate(event.block_hashes):
            parent = event.block_hashes[i - 1] if i else event.parent_block_hash
            assert vllms[block] == (parent, event.token_ids[i * 32 : (i + 1) * 32])


def test_nothing_is_told_before_it_is_durable(told, world: World) -> None:
    world.auto = False
    e = told()
    e.add("a", prompt(1, 200), max_tokens=30)
    e.step()
    (task,) = e.all_tasks()
    task.run({task.ids[2]: Status.IO_ERROR})  # copied, one block failed
    e.step()
    assert _ours(e) == []
    task.finish()
    e.step()
    e.step()
    before, after = _ours(e)  # of the failed one
    assert (len(before.token_ids), len(after.token_ids)) == (64, 64)
    assert after.parent_block_hash not in before.block_hashes
    for task in e.all_tasks():
        task.run()
        task.finish()
    e.run()


def test_extra_keys_and_adapters_are_told(told, world: World, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "x", str(world.model), 1)
    lora = LoRARequest(lora_name="bot", lora_int_id=3, lora_path=str(adapter))
    e = told()
    e.check_bytes = False
    e.generate("a", prompt(1, 130), lora_request=lora, cache_salt="tenant")
    (event,) = _ours(e)
    theirs = [k for v in _vllms(e, BlockStored) for k in v.extra_keys]
    assert (event.lora_name, event.lora_id) == ("bot", 3)
    assert event.extra_keys == theirs[:4]
    assert "tenant" in event.extra_keys[0]


def test_a_failed_load_and_a_lost_block_are_told_removed(told, world: World) -> None:
    tokens = prompt(1, 200)
    e = told()
    e.generate("a", tokens)
    stored = _flat(_ours(e))
    assert len(stored) == 6
    seed = e.connector._deployment.placement.all()[0].seed
    ids = [bytes(i) for i in e.chain_of(tokens).object_ids(seed)]
    e.told.clear()
    e.scheduler.reset_prefix_cache()
    world.faults[ids[1]] = Status.CORRUPT
    e.add("b", tokens)
    e.step()
    world.faults.clear()
    e.run()
    removed, stored_anew = _ours(e)
    assert isinstance(removed, BlockRemoved)
    assert sorted(removed.block_hashes) == sorted(stored[2:4])
    assert stored_anew.block_hashes == stored[2:4]

    e.told.clear()
    del world.objects[ids[2]]
    e.scheduler.reset_prefix_cache()
    e.generate("c", tokens)
    removed, stored_anew = _ours(e)
    assert sorted(removed.block_hashes) == sorted(stored[4:6])
    assert stored_anew.block_hashes == stored[4:6]


def test_a_reset_tells_all_of_them_removed(told, world: World) -> None:
    e = told()
    e.generate("a", prompt(1, 200))
    stored = _flat(_ours(e))
    e.told.clear()
    e.scheduler.reset_prefix_cache(reset_connector=True)
    e.generate("b", prompt(2, 40))
    (removed,) = _ours(e)
    assert sorted(removed.block_hashes) == sorted(stored)


def test_vllm_blocks_larger_than_stored_ones_are_told_whole(told, world: World) -> None:
    e = told(block_size=128, mla=True)
    assert e.grid_tokens() == 64
    e.generate("a", prompt(1, 200))  # three stored blocks, one whole block of vLLM's
    (event,) = _ours(e)
    assert (event.block_size, len(event.token_ids), len(event.block_hashes)) == (128, 128, 1)
    assert event.block_hashes == _flat(_vllms(e, BlockStored))[:1]


def test_without_kv_events_nothing_is_kept(engine, world: World) -> None:
    e = engine()
    assert e.connector._sched.events is None
    assert e.connector.take_events() == ()


def test_what_nobody_collects_is_bounded_and_counted(told, world: World, monkeypatch) -> None:
    monkeypatch.setattr(kv_events, "QUEUE_LIMIT", 1)
    e = told()
    side = e.connector._sched
    taken = side.events.take
    monkeypatch.setattr(side.events, "take", list)
    e.generate("a", prompt(1, 70))
    e.generate("b", prompt(2, 70))
    assert len(taken()) == 1
    assert e.counted["kv_events_dropped"] == 1


def test_a_consumer_reads_them_from_the_wire(engine, world: World, tmp_path: Path) -> None:
    """vLLM's ZMQ publisher and a subscriber that decodes with vLLM's own message types."""
    import msgspec
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    endpoint = f"ipc://{tmp_path}/events"
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv"
    )
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    e = engine(kv_events_config=config)
    socket.connect(endpoint)
    try:
        seen: list[Any] = []
        for attempt in range(20):  # a subscriber that joins late misses the first batches
            e.generate(f"a{attempt}", prompt(attempt, 70))
            while socket.poll(100):
                _, _, payload = socket.recv_multipart()
                batch = msgspec.msgpack.Decoder(KVEventBatch).decode(payload)
                seen += [event for event in batch.events if event.medium == STORAGE]
            if seen:
                break
        assert isinstance(seen[0], BlockStored)
        assert len(seen[0].token_ids) == 64
    finally:
        socket.close(0)
        context.term()
        e.scheduler.shutdown()
