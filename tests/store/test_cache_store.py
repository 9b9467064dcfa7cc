"""The store over the host cache and a medium with stated behaviour."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ucm_core.store.contract import Status
from ucm_core.testing.blocks import EngineMemory, block_id, id_array

IO_ERROR_FAULT, MISS_FAULT, HANG_FAULT = 1, 4, 5

MakeRig = Callable[..., Any]


class Dump:
    """A dump of whole objects that keeps its source memory alive."""

    def __init__(self, rig: Any, numbers: range | list[int]) -> None:
        self.source = EngineMemory.whole(rig.geometry, numbers).fill()
        self.task = rig.store.dump(self.source.ids, self.source.shards, self.source.addresses)

    def wait(self, timeout_s: float | None = None) -> Any:
        return self.task.wait(timeout_s)

    def wait_durable(self) -> Any:
        return self.task.wait_durable()


dump = Dump


def load(rig: Any, numbers: range | list[int]) -> tuple[list[int], EngineMemory]:
    target = EngineMemory.whole(rig.geometry, numbers)
    task = rig.store.load(target.ids, target.shards, target.addresses)
    return task.wait().tolist(), target


def cached(rig: Any, name: str) -> int:
    return int(rig.store.stats()[f"cache.{name}"])


def wait_until(done: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.005)
    return done()


def test_b18_lookups_and_prefetches_leave_room(make_rig: MakeRig) -> None:
    rig = make_rig(cache_slots=8)
    assert (dump(rig, range(8)).wait_durable() == Status.OK).all()
    ids = id_array(range(8))
    for _ in range(1000):
        rig.store.lookup(ids)
        rig.store.prefetch(ids)
    assert (dump(rig, range(100, 108)).wait_durable() == Status.OK).all()
    assert wait_until(lambda: cached(rig, "slots_pinned") == 0)
    assert rig.store.lookup(id_array(range(100, 108))).all()


def test_b18_all_slots_pinned_is_busy_within_the_timeout(make_rig: MakeRig) -> None:
    rig = make_rig(cache_slots=8, manual=True)
    first = dump(rig, range(8))
    assert (first.wait() == Status.OK).all()  # in the cache; the slow medium keeps them pinned
    started = time.monotonic()
    assert set(dump(rig, [50]).wait(0.3).tolist()) <= {Status.TIMEOUT, Status.REJECTED}
    assert time.monotonic() - started < 5
    rig.stage.step(100)
    assert (first.wait_durable() == Status.OK).all()
    assert (dump(rig, [51]).wait_durable() == Status.OK).all()


def reopened(rig: Any, **options: Any) -> None:
    """A new life over the same medium: everything is cold."""
    rig.store.close()
    rig.open(**options)


def test_b48_a_hot_load_does_not_wait_for_the_medium(make_rig: MakeRig) -> None:
    rig = make_rig(cache_slots=300, latency_us=10_000)
    queued = dump(rig, range(200))
    assert (queued.wait() == Status.OK).all()
    started = time.monotonic()
    statuses, target = load(rig, [150])
    assert time.monotonic() - started < 0.05  # five operations' time; its own write is still queued
    assert statuses == [Status.OK] * 4 and all(target.right(i) for i in range(4))
    assert (queued.wait_durable() == Status.OK).all()


def test_b48_a_cold_load_overtakes_queued_writes(make_rig: MakeRig) -> None:
    rig = make_rig(cache_slots=300)
    assert (dump(rig, [7]).wait_durable() == Status.OK).all()
    reopened(rig, cache_slots=300, latency_us=10_000)
    queued = dump(rig, range(100, 300))
    assert (queued.wait() == Status.OK).all()
    waiting = rig.stage.queued
    statuses, target = load(rig, [7])
    assert statuses == [Status.OK] * 4 and all(target.right(i) for i in range(4))
    # The read was served after at most five other operations (two seconds of writes were queued).
    assert waiting - rig.stage.queued <= 5 + 4
    assert (queued.wait_durable() == Status.OK).all()


def test_a_failed_fetch_is_absent_and_may_be_tried_again(make_rig: MakeRig) -> None:
    rig = make_rig(cache_slots=8)
    assert (dump(rig, [1]).wait_durable() == Status.OK).all()
    reopened(rig, cache_slots=8)
    rig.stage.inject(block_id(1), reads=True, fault=IO_ERROR_FAULT)
    statuses, target = load(rig, [1])
    assert Status.IO_ERROR in statuses
    assert all(target.untouched(i) for i, s in enumerate(statuses) if s != Status.OK)
    rig.medium.remove(block_id(1))
    assert not rig.store.lookup(id_array([1])).any()
    assert Status.MISS in load(rig, [1])[0]


def test_many_loads_of_one_object_read_it_once(make_rig: MakeRig) -> None:
    rig = make_rig(cache_slots=8)
    assert (dump(rig, [1]).wait_durable() == Status.OK).all()
    reopened(rig, cache_slots=8, manual=True)
    targets = [EngineMemory.whole(rig.geometry, [1]) for _ in range(5)]
    tasks = [rig.store.load(t.ids, t.shards, t.addresses) for t in targets]
    assert wait_until(lambda: rig.stage.queued > 0)
    rig.stage.step(100)
    for task, target in zip(tasks, targets, strict=True):
        assert (task.wait() == Status.OK).all()
        assert all(target.right(i) for i in range(4))
    assert cached(rig, "shards_owned_total") == 4
    assert cached(rig, "shards_waited_total") == 16


def test_a_failure_reaches_all_who_wait(make_rig: MakeRig) -> None:
    rig = make_rig(cache_slots=8)
    assert (dump(rig, [1]).wait_durable() == Status.OK).all()
    reopened(rig, cache_slots=8, manual=True)
    for _ in range(4):
        rig.stage.inject(block_id(1), reads=True, fault=IO_ERROR_FAULT)
    targets = [EngineMemory(rig.geometry, [(1, 0)]) for _ in range(4)]
    tasks = [rig.store.load(t.ids, t.shards, t.addresses) for t in targets]
    assert wait_until(lambda: rig.stage.queued > 0)
    rig.stage.step(100)
    for task, target in zip(tasks, targets, strict=True):
        assert task.wait().tolist() == [Status.IO_ERROR]
        assert target.untouched(0)
    assert wait_until(lambda: cached(rig, "slots_pinned") == 0)


def test_a_hanging_owner_times_out_and_keeps_its_buffer(make_rig: MakeRig) -> None:
    rig = make_rig(cache_slots=4)
    assert (dump(rig, [1]).wait_durable() == Status.OK).all()
    reopened(rig, cache_slots=4)
    rig.stage.inject(block_id(1), reads=True, fault=HANG_FAULT)
    target = EngineMemory.whole(rig.geometry, [1])
    task = rig.store.load(target.ids, target.shards, target.addresses)
    assert Status.TIMEOUT in task.wait(0.2).tolist()
    assert cached(rig, "slots_pinned") == 1  # quarantined: the read may still land
    before = target.memory.copy()
    assert rig.stage.release_hung(serve=True) >= 1
    assert wait_until(lambda: cached(rig, "slots_pinned") == 0)
    assert (target.memory == before).all()
    statuses, again = load(rig, [1])
    assert statuses == [Status.OK] * 4 and all(again.right(i) for i in range(4))


@pytest.mark.parametrize("slots", [5, 16])
def test_b61_threads_over_a_pool_that_overflows(make_rig: MakeRig, slots: int) -> None:
    rig = make_rig(cache_slots=slots)
    stop = time.monotonic() + 1.5
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while time.monotonic() < stop:
                numbers = [int(n) for n in rng.choice(64, 3, replace=False)]
                if rng.integers(2):
                    assert (dump(rig, numbers).wait() == Status.OK).all()
                else:
                    statuses, target = load(rig, numbers)
                    for i, status in enumerate(statuses):
                        assert status in (Status.OK, Status.MISS)
                        assert target.right(i) if status == Status.OK else target.untouched(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert wait_until(lambda: cached(rig, "slots_pinned") == 0)
