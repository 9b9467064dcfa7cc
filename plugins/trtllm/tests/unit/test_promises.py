"""Only what lies verified in host memory is promised, within budget and deadline, and stays until copied."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from prompts import SHARED, prompt, warm_up
from stub_manager import StubRequest
from stub_memory import Shape
from stub_storage import FakeStorage
from stub_world import World
from ucm_core import _native
from ucm_core.store.contract import Geometry, RunShape
from ucm_core.store.native_store import native_geometry
from ucm_trtllm.arena import CELLS, LOADS, Arena
from ucm_trtllm.residents import Residents


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> FakeStorage:
    found = FakeStorage()
    found.install(monkeypatch)
    return found


def save(world: World, storage: FakeStorage) -> None:
    with world.engine() as engine:
        engine.run(StubRequest(1, SHARED))
    assert len(storage) == 4


@pytest.mark.parametrize("how", ["corrupt", "truncate", "remove"])
@pytest.mark.parametrize("loads", ["sync", "async"])
def test_a_damaged_block_is_never_promised(
    new_world: World, storage: FakeStorage, how: str, loads: str
) -> None:
    new_world.configure(promise_loads=loads)
    save(new_world, storage)
    (medium,) = storage.media.values()
    key = _third_block(new_world)
    {"corrupt": medium.corrupt, "remove": medium.remove, "truncate": _cut(medium)}[how](key)
    with new_world.engine() as engine:
        request = StubRequest(2, SHARED + [7])
        engine.run(request)
        assert request.matched == [(0, 128)]


def _cut(medium: _native.FakeMedium):  # type: ignore[no-untyped-def]
    return lambda key: medium.truncate(key, 10)


def _third_block(world: World) -> bytes:
    """The id of tokens 128..191, from the adapter's own placement."""
    from ucm_core.identity import ContentChain

    with world.engine() as engine:
        warm_up(engine)
        placement = engine.manager.scheduler._deployment.placement
        chain = ContentChain(placement.grain)
        chain.extend(np.array(SHARED, np.int64))
        (place,) = placement.places
        (at,) = placement.keys.of(place.row.name)
        return bytes(placement.keys.block_ids(at, chain)[2])


def test_what_is_late_is_a_miss_and_serves_the_next(new_world: World, storage: FakeStorage) -> None:
    save(new_world, storage)
    storage.latency_us = 150_000
    new_world.configure(promise_wait_ms=60)
    with new_world.engine() as engine:
        first = StubRequest(2, SHARED + prompt(2, 9))
        before = time.monotonic()
        engine.run(first)
        assert first.matched == [(0, 0)]
        assert 0.05 < engine.longest_query_s < 0.06 + 1.0
        time.sleep(max(0.0, 1.0 - (time.monotonic() - before)))
        second = StubRequest(3, SHARED + prompt(3, 9))
        engine.local_reuse = False
        engine.run(second)
        assert second.matched == [(0, 256)]


def test_a_hanging_storage_costs_one_wait(new_world: World, storage: FakeStorage) -> None:
    save(new_world, storage)
    new_world.configure(promise_wait_ms=80)
    with new_world.engine() as engine:
        engine.local_reuse = False
        storage.hang()
        try:
            request = StubRequest(2, SHARED + prompt(2, 9))
            engine.run(request)
            assert request.matched == [(0, 0)]
            assert engine.longest_query_s < 0.08 + 1.0
        finally:
            storage.recover()


def test_the_budget_bounds_what_is_promised(new_world: World, storage: FakeStorage) -> None:
    """Two blocks fit: a prompt of four gets two, and the next prompt pushes them out."""
    save(new_world, storage)
    with new_world.engine() as engine:
        warm_up(engine)
        (row,) = engine.manager.scheduler._side._arena.name.row_bytes
    new_world.configure(promise_buffer_gb=f"{2 * row} b")
    with new_world.engine() as engine:
        engine.local_reuse = False
        for number in (2, 3):
            request = StubRequest(number, SHARED + prompt(number, 9))
            engine.run(request)
            assert request.matched == [(0, 128)]


def test_promised_blocks_stay_until_they_are_copied(new_world: World, storage: FakeStorage) -> None:
    """While one request's blocks are promised, another's reading cannot push them out."""
    with new_world.engine() as engine:
        engine.run(StubRequest(1, SHARED), StubRequest(2, prompt(50, 256)))
        (row,) = engine.manager.scheduler._side._arena.name.row_bytes
    new_world.configure(promise_buffer_gb=f"{4 * row} b")
    with new_world.engine() as engine:
        side = engine.manager.scheduler
        held, other = StubRequest(3, SHARED + [7]), StubRequest(4, prompt(50, 256) + [7])
        assert side.get_num_new_matched_tokens(held, 0)[0] == 256
        assert side.get_num_new_matched_tokens(other, 0) == (0, False)
        residents = side._side._stager.residents[0]
        assert residents.pinned == 4
        assert side.request_finished(held, []) is False
        assert residents.pinned == 0
        assert side.get_num_new_matched_tokens(other, 0)[0] == 256
        assert side.request_finished(other, []) is False


def test_a_failed_copy_stops_the_engine(new_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other way to tell it."""
    with new_world.engine() as engine:
        engine.run(StubRequest(1, SHARED))
    new_world.configure(promise_loads="sync")
    with new_world.engine() as engine:
        worker = engine.manager.workers[0]

        class Broken:
            def scatter(self, *args: object) -> tuple[int, int]:
                return 4, 5

            def unpin(self, memory: object) -> None: ...

        worker._side._device = Broken()
        request = StubRequest(2, SHARED + [7])
        with pytest.raises(RuntimeError, match="must not go on"):
            engine.run(request)
        # The engine is gone, and with it what the request held.
        record = engine.manager.scheduler._side._records.pop(2)
        side = engine.manager.scheduler._side
        side._stager.release(record.pinned)
        side._copying.clear()


def test_residents_give_up_the_longest_unused() -> None:
    residents = Residents(3)
    links = np.arange(96, dtype=np.uint8).reshape(3, 32)
    for link, slot in zip(links, residents.take(3), strict=True):
        residents.put(link.tobytes(), slot)
    residents.find(links[:1])  # used: the second one is the oldest now
    residents.pin(residents.find(links[2:]))
    assert residents.take(1) == [1]
    assert list(residents.find(links)) == [0, -1, 2]
    assert residents.take(5) == [0]
    assert residents.take(1) == []
    residents.unpin(np.array([2]))
    assert residents.take(1) == [2]
    residents.give_back(2)
    assert residents.free == 1 and len(residents) == 0


def test_a_block_that_came_twice_takes_one_slot() -> None:
    residents = Residents(2)
    first, second = residents.take(2)
    residents.put(b"x" * 32, first)
    residents.put(b"x" * 32, second)
    assert len(residents) == 1 and residents.free == 1


def test_ranks_meet_in_the_arena() -> None:
    arena = Arena.create(1 << 16, 2, (1000, 24))
    other = Arena.attach(arena.name)
    arena.data[1][3] = 7
    assert (other.data[1][3] == 7).all() and not other.data[1][2].any()
    other.finished(CELLS - 1, 1, LOADS)
    assert arena.least(CELLS - 1, LOADS) == 0
    arena.finished(CELLS - 1, 0, LOADS)
    assert arena.least(CELLS - 1, LOADS) == 1
    other.attached[1] = 1
    assert list(arena.attached) == [0, 1]


def test_what_was_asked_and_given_is_told_now_and_then(
    new_world: World,
    storage: FakeStorage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(new_world, storage)
    monkeypatch.setattr("ucm_trtllm.scheduler.TELL_S", 0.0)
    with new_world.engine() as engine, caplog.at_level("INFO", "ucm.trtllm"):
        engine.run(StubRequest(2, SHARED + [7]))
    said = [r.getMessage() for r in caplog.records if "tokens asked for" in r.getMessage()]
    assert said == [
        "UCM: 257 tokens asked for, 256 given; 4 blocks read and verified, 0 missing or damaged, "
        "0 without room"
    ]


def test_scatter_places_shards_and_skips() -> None:
    """Native: shards in one piece to strided runs; runs of two shapes take turns; address 0 is skipped."""
    stream = random.Random(3)
    shape = Geometry(1, 24, 2, RunShape(4, 2, 8), "test", (RunShape(16),))
    source = np.frombuffer(bytes(stream.randrange(256) for _ in range(48)), np.uint8).copy()
    target = np.zeros(128, np.uint8)
    base, where = target.ctypes.data, source.ctypes.data
    device = _native.host_device()
    rows = np.array([[base, base + 32], [base + 64, 0]], np.uint64)
    sources = np.array([where, where + 24], np.uint64)
    assert device.scatter(native_geometry(shape), sources, rows, 0) == (0, 0)
    assert (target[0:4] == source[0:4]).all() and (target[8:12] == source[4:8]).all()
    assert (target[32:48] == source[8:24]).all() and (target[64:68] == source[24:28]).all()
    assert not target[80:].any() and not target[4:8].any()
    with pytest.raises(ValueError, match="runs"):
        device.scatter(native_geometry(shape), sources, rows[:, :1].copy(), 0)
    with pytest.raises(ValueError, match="no such event"):
        device.scatter(native_geometry(shape), sources, rows, 99_999_999)


def test_windows_need_every_block_the_engine_may_stop_at(
    new_world: World, storage: FakeStorage
) -> None:
    """V2 may take less than it is offered, and reads a window's length before wherever it goes on."""
    shape = Shape(layers=4, groups=((None, (0, 2)), (48, (1, 3))))
    with new_world.engine(shape, v2=True) as engine:
        engine.run(StubRequest(1, SHARED))
        placement = engine.manager.scheduler._deployment.placement
        windowed = next(p for p in placement.places if p.row.window is not None)
        (at,) = placement.keys.of(windowed.row.name)
        from ucm_core.identity import ContentChain

        chain = ContentChain(placement.grain)
        chain.extend(np.array(SHARED, np.int64))
        ids = [bytes(key) for key in placement.keys.block_ids(at, chain)]
    for gone, expected in ((3, 192), (1, 64)):
        for medium in storage.media.values():
            medium.remove(ids[gone])
        with new_world.engine(shape, v2=True) as engine:
            request = StubRequest(2, SHARED + [7])
            engine.run(request)
            assert request.matched == [(0, expected)]
