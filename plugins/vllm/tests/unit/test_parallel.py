"""Ranks: coordinates, elected writers with takeover, and answers of several ranks combined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from memory_store import MemoryStore
from scripted_engine import World, kv_cache_config, prompt, vllm_config
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.errors import UnsupportedError
from ucm_core.identity import Manifest, ModelIdentity
from ucm_core.store.contract import Status
from ucm_vllm.facts import Facts, PageKind
from ucm_vllm.lanes import Lane
from ucm_vllm.messages import RowBlocks, TransferOp, UcmMetadata, UcmWorkerMetadata
from ucm_vllm.placement import Placement
from ucm_vllm.worker import WorkerSide

LAYERS = 6
GQA_KIND = PageKind(
    kind="full",
    engine_block=32,
    heads=8,
    total_heads=8,
    head_size=64,
    head_size_v=64,
    cell_bytes=256,
    dtype="bfloat16",
)
MLA_KIND = replace(
    GQA_KIND, kind="mla", heads=1, total_heads=1, head_size=576, head_size_v=0, cell_bytes=1152
)


def _facts(
    kind: PageKind = GQA_KIND,
    *,
    stages: tuple[tuple[int, int], ...] = ((0, LAYERS),),
    tp: int = 1,
    order: str = "LBNHC",
    **changes: Any,
) -> Facts:
    return Facts(
        kinds=(replace(kind, **changes),),
        kind_of=(0,) * LAYERS,
        tables=(0,),
        table_of=dict.fromkeys(range(LAYERS), 0),
        kv_cache_dtype="auto",
        physical_order=order,
        stages=stages,
        tp=tp,
    )


IDENTITY = ModelIdentity(weights="id:x", kv_dtype="bf16")


def _place(facts: Facts, slices: int = 1) -> Placement:
    return Placement.build(facts, IDENTITY, Manifest("n", 64, slices), "bf16")


def test_two_ranks_of_two_slices_hold_one_each_and_one_rank_holds_both() -> None:
    split = _place(_facts(tp=2, heads=4), 2)
    whole = _place(_facts(), 2)
    seeds = [at.seed for at in whole.of_rank(0, 0)]
    assert [at.seed for rank in (0, 1) for at in split.of_rank(0, rank)] == seeds
    assert [split.runs(at).offsets for at in split.of_rank(0, 1)] == [(0,)]
    assert [whole.runs(at).offsets for at in whole.of_rank(0, 0)] == [(0,), (4 * 256,)]
    for at in whole.all():
        assert str(whole.layout(at)) == str(split.layout(at))


def test_a_rank_that_would_hold_part_of_a_slice_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="part of a slice"):
        _place(_facts(tp=2, heads=4), 1)


def test_more_ranks_than_heads_hold_copies() -> None:
    facts = _facts(total_heads=2, heads=1, tp=4, replicas=2)
    placement = _place(facts, 4)
    seeds = [[at.seed for at in placement.of_rank(0, rank)] for rank in range(4)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_stages_are_layer_ranges_and_uneven_ones_too() -> None:
    placement = _place(_facts(stages=((0, 2), (2, 6))))
    assert [at.coordinate.layers for at in placement.all()] == [(0, 1), (2, 3, 4, 5)]
    assert [at.coordinate.layers for at in placement.of_rank(1, 0)] == [(2, 3, 4, 5)]
    whole = _place(_facts())
    assert not {at.seed for at in placement.all()} & {at.seed for at in whole.all()}


def test_mla_is_one_object_on_all_ranks() -> None:
    placement = _place(_facts(MLA_KIND, tp=4, replicas=4))
    assert len({placement.of_rank(0, rank)[0].seed for rank in range(4)}) == 1
    assert placement.all()[0].seed == _place(_facts(MLA_KIND)).all()[0].seed


@pytest.mark.parametrize("facts", [_facts(), _facts(MLA_KIND), _facts(order="LBHNC")])
def test_descriptors_say_how_many_bytes_a_shard_has(facts: Facts) -> None:
    placement = _place(facts)
    (at,) = placement.all()
    runs = placement.runs(at)
    layout = placement.layout(at)
    assert layout == LayoutDescriptor.parse(str(layout))
    assert layout.shard_count == 6
    assert layout.shard_bytes == placement.rows[0].grid.pieces * runs.nbytes


# -- elected writers -----------------------------------------------------------------------------------


def _ranks(
    world: World, count: int, *, auto: bool = True
) -> tuple[list[WorkerSide], list[MemoryStore]]:
    """Workers of ``count`` ranks that hold equal content, over one set of objects."""
    world.use()
    config = vllm_config(world)
    kv = kv_cache_config(config, 16, mla=True)
    from ucm_vllm.deployment import Deployment, Settings

    settings = Settings(roots=(world.folder / "cache",), model_id="scripted")
    workers, stores = [], []
    for rank in range(count):
        deployment = Deployment(config, kv, settings, world.open_store)
        caches = {name: torch.rand(16, 1, 32, 4) for name in kv.kv_cache_groups[0].layer_names}
        worker = deployment.worker_side(caches, 0, 0)
        worker.lanes[:] = [replace(lane, replica=rank, replicas=count) for lane in worker.lanes]
        worker.keep = caches  # type: ignore[attr-defined]
        workers.append(worker)
        stores.append(world.stores[-1])
    return workers, stores


def _save(op_id: int, blocks: list[int], attempt: int = 0) -> TransferOp:
    rng = np.random.default_rng(1)
    links = rng.integers(0, 256, (16, 32), dtype=np.uint8)[blocks]
    pages = np.array([[[2 * b + 1, 2 * b + 2]] for b in blocks], dtype=np.int32)
    part = RowBlocks(0, links, np.array(blocks), pages)
    return TransferOp(op_id, "r", (part,), 0, 10_000, attempt)


def _rows(store: MemoryStore) -> int:
    return sum(len(task.results) for task in store.tasks)


def test_equal_content_is_written_once(world: World) -> None:
    workers, stores = _ranks(world, 3)
    for worker in workers:
        worker.start_saves(UcmMetadata(saves=[_save(1, [0, 1, 2, 3, 4])]))
    layers = 2
    assert [_rows(store) // layers for store in stores] == [2, 2, 1]
    assert len(world.objects) == 5
    total = UcmWorkerMetadata()
    for worker in workers:
        worker.poll(UcmMetadata())
        meta = worker.take_metadata()
        assert meta is not None
        total = total.aggregate(meta)
        assert not any(worker.pending().values())
    assert total.copied == total.ended == {1: 3}
    assert total.failed == {}


def test_the_next_attempt_is_another_rank(world: World) -> None:
    workers, stores = _ranks(world, 2)
    for attempt in (0, 1):
        for worker in workers:
            worker.start_saves(UcmMetadata(saves=[_save(attempt, [4], attempt)]))
    assert [_rows(store) for store in stores] == [2, 2]


def test_a_failed_save_is_taken_over_once_per_rank(engine, world: World) -> None:
    """One failure never loses the block; when every rank has failed it is given up."""
    e = engine(mla=True)
    side = e.connector._sched
    side.saving.replicas = 2
    e.add("a", prompt(1, 200), max_tokens=6)
    e.store.auto = False
    e.step()
    (task,) = e.all_tasks()
    key = task.ids[2]
    task.run({key: Status.IO_ERROR})
    task.finish()
    e.step()  # the failure is told
    e.store.auto = True
    e.step()  # the next rank's turn
    ops = [t for t in e.all_tasks() if t.kind == "dump"]
    assert [len(t.results) for t in ops] == [6, 2]
    assert set(ops[1].ids) == {key}
    e.run()
    assert len(world.objects) == 3
    assert e.pending() == {}


def test_takeover_is_dropped_when_the_blocks_are_gone(engine, world: World) -> None:
    e = engine(mla=True)
    e.connector._sched.saving.replicas = 2
    e.add("a", prompt(1, 200), max_tokens=2)
    e.store.auto = False
    e.step()
    (task,) = e.all_tasks()
    e.step()
    assert "a" in e.finished
    task.run({task.ids[0]: Status.IO_ERROR})
    task.finish()
    for _ in range(3):
        e.step()
    assert len(e.all_tasks()) == 1
    assert e.pending() == {}


def test_a_block_that_was_lost_starts_with_the_next_writer(engine, world: World) -> None:
    """Nobody could take over in time: the next request that computes the block asks another rank."""
    e = engine(mla=True, enable_prefix_caching=False)
    e.connector._sched.saving.replicas = 2
    orders: list[tuple[int, list[int]]] = []
    start = e.worker.bind_connector_metadata

    def bound(meta: UcmMetadata) -> None:
        orders.extend((op.attempt, list(op.parts[0].blocks)) for op in meta.saves)
        start(meta)

    e.worker.bind_connector_metadata = bound
    e.store.auto = False
    e.add("a", prompt(1, 200), max_tokens=1)
    e.step()
    (task,) = e.all_tasks()
    task.run({task.ids[0]: Status.IO_ERROR})
    task.finish()
    e.run()
    e.store.auto = True
    e.generate("b", prompt(1, 200))
    assert orders == [(0, [0, 1, 2]), (1, [0])]
    assert len(world.objects) == 3
    orders.clear()
    world.objects.clear()
    e.generate("c", prompt(1, 200))
    assert orders == [(0, [0, 1, 2])], "stored meanwhile: as usual again"
    assert e.pending() == {}


def test_failures_of_several_ranks_are_one_failure() -> None:
    a = UcmWorkerMetadata(copied={1: 1}, ended={1: 1}, failed={1: np.array([0, 2])})
    b = UcmWorkerMetadata(copied={1: 1}, failed={1: np.array([1, 2])}, bad={7: np.array([3])})
    total = a.aggregate(b)
    assert total.copied == {1: 2}
    assert list(total.failed[1]) == [0, 1, 2]
    assert list(total.bad[7]) == [3]
    assert bool(total)
    assert not UcmWorkerMetadata()


def test_lanes_of_one_worker_are_all_needed(world: World) -> None:
    """A block is loaded when every lane delivered it; one lane's miss makes the block bad."""
    workers, _ = _ranks(world, 1)
    (worker,) = workers
    (lane,) = worker.lanes
    other = Lane(**{**_fields(lane), "seed": b"\1" * 32})
    worker.lanes[:] = [lane, other]
    worker.start_saves(UcmMetadata(saves=[_save(1, [0, 1])]))
    assert len(world.objects) == 4
    from ucm_vllm.identity import object_ids

    gone = bytes(object_ids(other.seed, _save(1, [1]).parts[0].links)[0])
    del world.objects[gone]
    worker.start_loads(UcmMetadata(loads=[_save(2, [0, 1])]))
    sent, received, failed = worker.poll(UcmMetadata())
    assert received == {"r"}
    assert failed == set()  # vLLM is told engine blocks
    meta = worker.take_metadata()
    assert meta is not None
    assert list(meta.bad[2]) == [1]
    assert worker.take_failed_pages() == {3, 4}
    assert sent == set()


def _fields(lane: Lane) -> dict[str, Any]:
    return {name: getattr(lane, name) for name in Lane.__dataclass_fields__}
