"""Snapshots over real stages: whole or nothing, private copies, right even when the store forgets."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from ucm_core.errors import ClosedError
from ucm_core.store.contract import CommitMode, Status
from ucm_core.store.snapshot import SnapshotStore
from ucm_core.store.touch import TouchThrottle
from ucm_core.testing.blocks import UNTOUCHED, EngineMemory, block_id, geometry_of, id_array

from .conftest import Rig

MakeRig = Callable[..., Rig]
CORRUPT_FAULT = 2


class States:
    """Memory of some snapshots in the shape that the store takes."""

    def __init__(self, rig: Rig, numbers: list[int]) -> None:
        geometry = rig.geometry
        self.rows = EngineMemory.whole(geometry, numbers)
        self.ids = id_array(numbers)
        self.shards = geometry.shard_count
        shape = (len(numbers), self.shards, geometry.runs_per_shard)
        self.addresses = self.rows.addresses.reshape(shape)

    def right(self, i: int) -> bool:
        return all(self.rows.right(i * self.shards + s) for s in range(self.shards))


def saved(rig: Rig, numbers: list[int]) -> SnapshotStore:
    store = SnapshotStore(rig.store)
    source = States(rig, numbers)
    source.rows.fill()
    assert (store.put(source.ids, source.addresses).wait_durable() == Status.OK).all()
    return store


@pytest.mark.parametrize("cache_slots", [0, 8], ids=["staging", "cache"])
def test_many_requests_use_one_snapshot_at_once(make_rig: MakeRig, cache_slots: int) -> None:
    """Copy on use: each gets a copy of its own, and what it does to it reaches nobody."""
    rig = make_rig(cache_slots=cache_slots)
    store = saved(rig, [1, 2])
    users = [States(rig, [1, 2]) for _ in range(4)]
    tasks = [store.get(user.ids, user.addresses) for user in users]
    for task, user in zip(tasks, users, strict=True):
        assert task.wait().tolist() == [Status.OK, Status.OK]
        assert user.right(0) and user.right(1)
        user.rows.memory[:] = 0x55  # continues computing in place
    again = States(rig, [1, 2])
    assert (store.get(again.ids, again.addresses).wait() == Status.OK).all()
    assert again.right(0) and again.right(1)


def test_one_batch_may_hold_one_snapshot_twice(rig: Rig) -> None:
    store = saved(rig, [1])
    first, second = States(rig, [1]), States(rig, [1])
    ids = np.concatenate([first.ids, second.ids])
    where = np.concatenate([first.addresses, second.addresses])
    assert store.get(ids, where).wait().tolist() == [Status.OK, Status.OK]
    assert first.right(0) and second.right(0)


def test_a_put_of_what_is_stored_changes_nothing(rig: Rig) -> None:
    store = saved(rig, [1])
    other = States(rig, [1])
    other.rows.memory[:] = 0x11
    assert store.put(other.ids, other.addresses).wait_durable().tolist() == [Status.OK]
    target = States(rig, [1])
    assert store.get(target.ids, target.addresses).wait().tolist() == [Status.OK]
    assert target.right(0)


def test_whole_or_nothing(rig: Rig) -> None:
    """Layers put one after the other: absent until the last one is in, in whatever order."""
    store = SnapshotStore(rig.store)
    source = States(rig, [1])
    source.rows.fill()
    for shard in (3, 1, 0):
        some = np.ascontiguousarray(source.addresses[:, [shard]])
        assert store.put(source.ids, some, shards=[shard]).wait().tolist() == [Status.OK]
        assert not store.lookup(source.ids).any()
    target = States(rig, [1])
    assert store.get(target.ids, target.addresses).wait().tolist() == [Status.MISS]
    last = np.ascontiguousarray(source.addresses[:, [2]])
    assert store.put(source.ids, last, shards=[2]).wait_durable().tolist() == [Status.OK]
    assert store.lookup(source.ids).all()


def test_one_bad_shard_spoils_its_snapshot_alone(rig: Rig) -> None:
    store = saved(rig, [1, 2, 3])
    rig.stage.inject(block_id(2), reads=True, fault=CORRUPT_FAULT)
    target = States(rig, [1, 2, 3])
    statuses = store.get(target.ids, target.addresses).wait().tolist()
    assert statuses == [Status.OK, Status.CORRUPT, Status.OK]
    assert target.right(0) and target.right(2)


def test_evicted_between_lookup_and_get_is_a_miss(rig: Rig) -> None:
    store = saved(rig, [1])
    assert store.lookup(id_array([1])).all()
    store.remove(id_array([1]))
    target = States(rig, [1])
    assert store.get(target.ids, target.addresses).wait().tolist() == [Status.MISS]
    assert (target.rows.memory == UNTOUCHED).all()


def test_explicit_commit(rig: Rig) -> None:
    store = SnapshotStore(rig.store)
    source = States(rig, [1, 2])
    source.rows.fill()
    put = store.put(source.ids, source.addresses, commit=CommitMode.EXPLICIT)
    assert not store.lookup(source.ids).any()
    store.discard(id_array([2]))
    assert store.commit(id_array([1])).wait_durable().tolist() == [Status.OK]
    assert store.lookup(source.ids).tolist() == [True, False]
    assert put.wait_durable().tolist() == [Status.OK, Status.CANCELLED]


def test_addresses_are_whole_and_of_the_right_shape(rig: Rig) -> None:
    store = saved(rig, [1])
    target = States(rig, [1])
    target.addresses[0, 2, 1] = 0
    with pytest.raises(ValueError, match="whole or not at all"):
        store.get(target.ids, target.addresses)
    with pytest.raises(ValueError, match=r"expected C-contiguous \(1, 4, 2\)"):
        store.get(target.ids, target.addresses[:, :3])
    with pytest.raises(TypeError, match="uint64, got int64"):
        store.get(target.ids, target.addresses.astype(np.int64))  # type: ignore[arg-type]


def test_an_empty_batch(rig: Rig) -> None:
    store = SnapshotStore(rig.store)
    none = States(rig, [])
    assert len(store.get(none.ids, none.addresses).wait()) == 0
    assert len(store.put(none.ids, none.addresses).wait_durable()) == 0


def test_states_of_other_sizes_are_other_stores(make_rig: MakeRig) -> None:
    """A group's state of 3 shards and another's of 1: two instances, one code path."""
    for geometry in (geometry_of(3, 96, 1), geometry_of(1, 4096, 1)):
        rig = make_rig(geometry=geometry)
        store = saved(rig, [5])
        target = States(rig, [5])
        assert store.get(target.ids, target.addresses).wait().tolist() == [Status.OK]
        assert target.right(0)


# -- donated buffers -------------------------------------------------------------------------------


def filled(rig: Rig, number: int) -> np.ndarray:
    rows = EngineMemory.whole(rig.geometry, [number]).fill().memory
    return rows.reshape(rig.geometry.shard_count, -1)


@pytest.mark.parametrize("cache_slots", [0, 8], ids=["staging", "cache"])
def test_donated_without_a_copy(make_rig: MakeRig, cache_slots: int) -> None:
    rig = make_rig(cache_slots=cache_slots)
    store = SnapshotStore(rig.store)
    buffer = store.lend(id_array([1]))
    assert buffer is not None and rig.store.stats()["store.buffers_lent"] == 1
    assert buffer.array.shape == (rig.geometry.shard_count, rig.geometry.shard_bytes)
    buffer.array[:] = filled(rig, 1)
    assert not store.lookup(id_array([1])).any()
    assert store.donate(buffer).wait_durable().tolist() == [Status.OK]
    assert rig.store.stats()["store.dump_copied_bytes_total"] == 0
    assert rig.store.stats()["store.buffers_lent"] == 0
    target = States(rig, [1])
    assert store.get(target.ids, target.addresses).wait().tolist() == [Status.OK]
    assert target.right(0)
    with pytest.raises(ValueError, match="not yours any more"):
        _ = buffer.array
    with pytest.raises(ValueError, match="already"):
        buffer.donate()


def test_given_back_or_dropped_is_as_if_nothing_was(rig: Rig) -> None:
    store = SnapshotStore(rig.store)
    buffer = store.lend(id_array([1]))
    assert buffer is not None
    buffer.give_back()
    buffer.give_back()
    dropped = store.lend(id_array([2]))
    assert dropped is not None
    view = dropped.array
    del dropped
    view[:] = 0  # still valid memory: the array keeps the loan
    assert rig.store.stats()["store.buffers_lent"] == 1
    del view
    assert rig.store.stats()["store.buffers_lent"] == 0
    for number in (1, 2):
        assert not store.lookup(id_array([number])).any()
    assert saved(rig, [1, 2]).lookup(id_array([1, 2])).all()


def test_no_buffer_where_a_put_serves(make_rig: MakeRig) -> None:
    """Without room, and for what is being written or kept in memory already."""
    rig = make_rig(load_reserve=1, shared=2)
    store = SnapshotStore(rig.store)
    held = [store.lend(id_array([n])) for n in (1, 2)]
    assert all(held)
    assert store.lend(id_array([3])) is None
    assert store.lend(id_array([1])) is None
    held[0].give_back()  # type: ignore[union-attr]
    assert store.lend(id_array([3])) is not None
    cached = make_rig(cache_slots=4)
    assert saved(cached, [5]).lend(id_array([5])) is None


def test_a_put_of_a_lent_id_follows_its_fate(rig: Rig) -> None:
    store = SnapshotStore(rig.store)
    buffer = store.lend(id_array([1]))
    assert buffer is not None
    source = States(rig, [1])
    source.rows.fill()
    put = store.put(source.ids, source.addresses)
    assert put.wait().tolist() == [Status.OK]  # its source is not needed
    buffer.array[:] = filled(rig, 1)
    assert store.donate(buffer).wait_durable().tolist() == [Status.OK]
    assert put.wait_durable().tolist() == [Status.OK]


def test_a_buffer_kept_too_long_is_a_miss_and_stays_the_borrowers(make_rig: MakeRig) -> None:
    rig = make_rig(load_reserve=1, shared=1, options={"open_age_ms": 50})
    store = SnapshotStore(rig.store)
    buffer = store.lend(id_array([1]))
    assert buffer is not None
    deadline = time.monotonic() + 10
    while not rig.store.stats()["store.expired_open_objects_total"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.lend(id_array([2])) is None  # the memory is still on loan
    buffer.array[:] = 7
    assert store.donate(buffer).wait().tolist() == [Status.MISS]
    assert not store.lookup(id_array([1])).any()
    assert store.lend(id_array([2])) is not None


def test_discard_and_close_with_a_buffer_on_loan(make_rig: MakeRig) -> None:
    rig = make_rig()
    store = SnapshotStore(rig.store)
    buffer, other = store.lend(id_array([1])), store.lend(id_array([2]))
    assert buffer is not None and other is not None
    store.discard(id_array([1]))
    assert store.donate(buffer).wait().tolist() == [Status.MISS]
    view = other.array
    began = time.monotonic()
    store.close(20)
    assert time.monotonic() - began < 5  # a loan is no work in flight
    view[:] = 1  # and its memory outlives the store
    with pytest.raises(ClosedError):
        other.donate()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_hits_become_few_touches() -> None:
    sent: list[list[bytes]] = []
    clock = Clock()
    throttle = TouchThrottle(
        lambda ids: sent.append([row.tobytes() for row in ids]),
        interval_s=10,
        batch=4,
        clock=clock,
    )
    for _ in range(100):
        throttle.hit(id_array([1, 2]))
    assert sent == [] and throttle.suppressed == 198
    throttle.hit(id_array([3, 3, 4]))
    assert [set(batch) for batch in sent] == [{block_id(n) for n in (1, 2, 3, 4)}]
    clock.now = 5.0
    throttle.hit(id_array([1, 5]))
    assert len(sent) == 1
    clock.now = 10.5  # the interval is over for 1, not for 5, which waits to be sent
    throttle.hit(id_array([1, 5]))
    assert set(sent[1]) == {block_id(1), block_id(5)}
    throttle.hit(id_array([6]))
    throttle.flush()
    throttle.flush()
    assert sent[2:] == [[block_id(6)]]


def test_touches_reach_the_medium(rig: Rig) -> None:
    """Through a throttle into the real store: the stage is told each id once."""
    store = saved(rig, [1, 2])
    throttle = TouchThrottle(store.touch, interval_s=60)
    for _ in range(5):
        throttle.hit(id_array([1, 2]))
    throttle.flush()
    assert [n for key, n in store.stats().items() if key.endswith(".touches_total")] == [2]
