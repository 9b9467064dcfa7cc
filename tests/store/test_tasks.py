"""Results, events, bounds and the language border of the Python face; timing-exact cases are native."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from ucm_core import _native
from ucm_core.errors import ClosedError
from ucm_core.store.contract import CommitMode, Status, TaskState
from ucm_core.testing.blocks import EngineMemory, block_id, geometry_of, id_array

MISS_FAULT, HANG, ZERO_BYTES, IO_ERROR = 4, 5, 3, 1


def test_b06_the_source_is_read_after_the_event(rig: Any) -> None:
    event = _native.HostEvent()
    source = EngineMemory.whole(rig.geometry, [1])
    source.memory[:] = 0xAA
    task = rig.store.dump(source.ids, source.shards, source.addresses, event=event.handle)
    time.sleep(0.2)
    assert not task.check() and task.state() == TaskState.SUBMITTED
    source.memory[:] = 0xBB
    event.fire()
    assert (task.wait_durable() == Status.OK).all()
    stored = rig.medium.get(block_id(1))
    stride = _native.Geometry(4, 1280, 2, [(640, 1, 0)], "").shard_stride
    shards = np.frombuffer(stored, np.uint8).reshape(4, stride)[:, : rig.geometry.shard_bytes]
    assert (shards == 0xBB).all()


def test_b06_an_event_that_never_fires(rig: Any) -> None:
    event = _native.HostEvent()
    source = EngineMemory.whole(rig.geometry, [1]).fill()
    task = rig.store.dump(source.ids, source.shards, source.addresses, event=event.handle)
    assert (task.wait(0.05) == Status.TIMEOUT).all()
    assert (task.wait() == Status.TIMEOUT).all()
    assert task.state() == TaskState.FAILED
    assert not rig.store.lookup(id_array([1])).any()


def test_b54_results_per_block(rig: Any) -> None:
    rig.stored(range(4))
    rig.stage.inject(block_id(1), reads=True, fault=ZERO_BYTES)
    rig.medium.remove(block_id(2))
    target = EngineMemory(rig.geometry, [(n, 0) for n in range(4)])
    task = rig.store.load(target.ids, target.shards, target.addresses)
    expected = [Status.OK, Status.CORRUPT, Status.MISS, Status.OK]
    assert task.wait().tolist() == expected
    assert task.wait().tolist() == expected == task.results().tolist()
    assert [task.wait_shard(i) for i in range(4)] == expected
    assert rig.store.lookup_on_prefix(target.ids) == 0
    assert rig.store.stats()["store.load_rows_ok_total"] == 2


def test_b59_a_full_medium(make_rig: Any) -> None:
    rig = make_rig(options={"write_retries": 0})
    rig.medium.set_capacity(10)
    source = EngineMemory.whole(rig.geometry, range(12)).fill()
    task = rig.store.dump(source.ids, source.shards, source.addresses)
    assert (task.wait() == Status.OK).all()
    durable = task.wait_durable()
    rejected = durable == Status.REJECTED
    assert rejected.sum() == 2 * rig.geometry.shard_count
    assert set(task.durable_errnos()[rejected]) == {28}  # ENOSPC
    assert rig.store.stats()["store.backend_dump_errors_total"] == 2
    ids = id_array(range(12))
    assert rig.store.lookup_on_prefix(ids) == 9
    for number in range(5):
        rig.medium.remove(block_id(number))
    rig.stored([10, 11])
    assert rig.store.lookup_on_prefix(ids) == -1
    assert rig.store.lookup_on_reverse(ids) == 11


# Spec 3.8 item 2: a medium that loses or refuses everything is not reported as success.
def test_a_destroyed_medium_is_not_success(rig: Any) -> None:
    rig.stored([1])
    rig.medium.clear()
    assert not rig.store.lookup(id_array([1])).any()
    rig.stage.inject(block_id(2), reads=False, fault=IO_ERROR, error=2, times=100)
    source = EngineMemory.whole(rig.geometry, [2]).fill()
    task = rig.store.dump(source.ids, source.shards, source.addresses)
    assert (task.wait_durable() == Status.IO_ERROR).all()
    assert (task.durable_errnos() == 2).all()
    assert task.state() == TaskState.FAILED
    assert rig.store.stats()["store.backend_dump_errors_total"] == 1


# Spec 3.8 item 3: a failed load leaves nothing that looks present.
def test_a_failed_load_is_not_presence(rig: Any) -> None:
    target = EngineMemory.whole(rig.geometry, [1])
    task = rig.store.load(target.ids, target.shards, target.addresses)
    assert (task.wait() == Status.MISS).all()
    assert not rig.store.lookup(id_array([1])).any()


# Spec 3.8 item 12: one slow request does not stall what is submitted after it.
def test_a_hung_block_stalls_nobody_else(rig: Any) -> None:
    rig.stored(range(4))
    rig.stage.inject(block_id(0), reads=True, fault=HANG)
    slow = EngineMemory.whole(rig.geometry, [0, 1])
    stuck = rig.store.load(slow.ids, slow.shards, slow.addresses)
    fast = EngineMemory.whole(rig.geometry, [2, 3])
    assert (rig.store.load(fast.ids, fast.shards, fast.addresses).wait() == Status.OK).all()
    assert [stuck.wait_shard(i) for i in range(4, 8)] == [Status.OK] * 4  # in the same batch, too
    assert (stuck.wait(0.05)[:4] == Status.TIMEOUT).all()
    rig.stage.release_hung(serve=True)
    assert all(slow.untouched(row) for row in range(4))


def test_commit_and_discard(rig: Any) -> None:
    source = EngineMemory.whole(rig.geometry, [1, 2]).fill()
    dump = rig.store.dump(source.ids, source.shards, source.addresses, commit=CommitMode.EXPLICIT)
    assert (dump.wait() == Status.OK).all() and dump.state() == TaskState.IN_BACKEND
    assert not rig.store.lookup(id_array([1, 2])).any()
    rig.store.discard(id_array([2]))
    committed = rig.store.commit(id_array([1, 2]))
    assert committed.wait_durable().tolist() == [Status.OK, Status.MISS]
    assert rig.store.lookup(id_array([1, 2])).tolist() == [True, False]
    durable = dump.wait_durable()
    assert (durable[:4] == Status.OK).all() and (durable[4:] == Status.CANCELLED).all()


def test_close_is_idempotent_and_final(rig: Any) -> None:
    rig.stored([1])
    rig.store.close()
    rig.store.close()
    with pytest.raises(ClosedError, match="was closed"):
        rig.store.lookup(id_array([1]))
    rows = EngineMemory.whole(rig.geometry, [1]).fill()
    with pytest.raises(ClosedError):
        rig.store.dump(rows.ids, rows.shards, rows.addresses)
    assert rig.store.stats()["store.abandoned_io_total"] == 0


class Counting:
    """Counts calls that cross the language border."""

    def __init__(self, native: Any) -> None:
        self._native, self.calls = native, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._native, name)

        def call(*args: Any) -> Any:
            self.calls += 1
            return method(*args)

        return call


def test_b45_one_call_for_2000_blocks(make_rig: Any) -> None:
    rig = make_rig(geometry_of(1, 512, 1), shared=64)
    rig.stored(range(2000))
    border = Counting(rig.store._native)
    rig.store._native = border
    target = EngineMemory.whole(rig.geometry, range(2000))
    task = rig.store.load(target.ids, target.shards, target.addresses)
    waits = Counting(task._native)
    waits.__class__.__len__ = lambda self: 2000  # type: ignore[attr-defined]
    task._native = waits
    assert (task.wait() == Status.OK).all()
    assert border.calls == 1 and waits.calls == 1


def test_b45_waiting_releases_the_gil(rig: Any) -> None:
    """A thread of this interpreter ends the wait: with the GIL held nobody could."""
    rig.stored([1])
    rig.stage.inject(block_id(1), reads=True, fault=HANG)
    target = EngineMemory.whole(rig.geometry, [1])
    task = rig.store.load(target.ids, target.shards, target.addresses)
    while rig.stage.hung == 0:
        time.sleep(0.001)
    helper = threading.Timer(0.05, rig.stage.release_hung, kwargs={"serve": True})
    helper.start()
    assert (task.wait(15) == Status.OK).all()
    helper.join()


def test_b45_lookup_releases_the_gil(rig: Any) -> None:
    ids = np.random.default_rng(1).integers(1, 256, (400_000, 16), dtype=np.uint8)
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    rig.store.lookup(ids)
    during = counted[0] - before
    stop.set()
    thread.join()
    assert during > 1000  # with the GIL held for the call it would be a handful


def test_concurrent_use_from_python_threads(make_rig: Any) -> None:
    rig = make_rig(options={"copiers": 2}, load_reserve=2, shared=6, lanes=2)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(25):
                numbers = rng.choice(16, 4, replace=False).tolist()
                source = EngineMemory.whole(rig.geometry, numbers).fill()
                rig.store.dump(source.ids, source.shards, source.addresses).wait()
                target = EngineMemory.whole(rig.geometry, numbers)
                result = rig.store.load(target.ids, target.shards, target.addresses).wait()
                for row, status in enumerate(result):
                    assert target.right(row) if status == Status.OK else target.untouched(row)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_ctrl_c_ends_a_wait(rig: Any) -> None:
    import signal

    rig.stored([1])
    rig.stage.inject(block_id(1), reads=True, fault=HANG)
    target = EngineMemory.whole(rig.geometry, [1])
    task = rig.store.load(target.ids, target.shards, target.addresses)
    timer = threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT))
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            task.wait(15)
    finally:
        signal.signal(signal.SIGINT, old)
        timer.join()
    task.cancel()
    assert (task.wait() == Status.CANCELLED).all()


def test_check_waits_without_expiring_anything(rig: Any) -> None:
    event = _native.HostEvent()
    source = EngineMemory.whole(rig.geometry, [1]).fill()
    task = rig.store.dump(source.ids, source.shards, source.addresses, event=event.handle)
    started = time.monotonic()
    assert not task.check(0.05)
    assert time.monotonic() - started >= 0.05
    assert task.state() == TaskState.SUBMITTED
    event.fire()
    assert task.check(10.0)
    assert (task.wait() == Status.OK).all()
