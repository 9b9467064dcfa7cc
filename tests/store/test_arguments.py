"""Arguments are taken as they are or refused: no silent copy, no collapsed id, no half submission."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ucm_core.store.contract import Geometry, RunShape, Status
from ucm_core.store.native_store import native_geometry
from ucm_core.testing.blocks import EngineMemory, id_array


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        (np.zeros((2, 16), np.int8), TypeError, "expected dtype uint8, got int8"),
        (np.ones((2, 8), np.uint8), ValueError, r"expected shape \(N, 16\), got \(2, 8\)"),
        (np.ones(16, np.uint8), ValueError, "expected shape"),
        (np.ones((4, 32), np.uint8)[:, ::2], ValueError, "C-contiguous"),
        ([b"x" * 16], TypeError, "numpy array, got list"),
        (np.zeros((1, 16), np.uint8), ValueError, r"ids\[0\] is all zero"),
    ],
)
@pytest.mark.parametrize(
    "call",
    ["lookup", "lookup_on_prefix", "lookup_on_reverse", "prefetch", "touch", "commit", "discard"],
)
def test_bad_ids(rig: Any, call: str, ids: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        getattr(rig.store, call)(ids)


@pytest.mark.parametrize("call", ["load", "dump"])
def test_bad_rows(rig: Any, call: str) -> None:
    rows = EngineMemory.whole(rig.geometry, [1]).fill()
    submit = getattr(rig.store, call)
    with pytest.raises(TypeError, match="shards: expected dtype uint32, got int64"):
        submit(rows.ids, rows.shards.astype(np.int64), rows.addresses)
    with pytest.raises(TypeError, match="addresses: expected dtype uint64, got int64"):
        submit(rows.ids, rows.shards, rows.addresses.astype(np.int64))
    with pytest.raises(ValueError, match=r"addresses: expected shape \(4, 2\), got \(4, 1\)"):
        submit(rows.ids, rows.shards, rows.addresses[:, :1].copy())
    with pytest.raises(ValueError, match="addresses: expected a C-contiguous"):
        submit(rows.ids, rows.shards, np.asfortranarray(rows.addresses))
    with pytest.raises(ValueError, match="objects have 4 shards"):
        submit(rows.ids, rows.shards + np.uint32(1), rows.addresses)
    rows.ids[2] = 0
    with pytest.raises(ValueError, match=r"ids\[2\] is all zero"):
        submit(rows.ids, rows.shards, rows.addresses)
    assert rig.store.stats()[f"store.{call}_tasks_total"] == 0


def test_address_0_refuses_the_whole_dump(rig: Any) -> None:
    rows = EngineMemory.whole(rig.geometry, [1, 2]).fill()
    rows.addresses[5, 1] = 0
    with pytest.raises(ValueError, match="address 0 in row 5, run 1"):
        rig.store.dump(rows.ids, rows.shards, rows.addresses)
    assert len(rig.medium) == 0
    assert rig.store.stats()["store.objects_open"] == 0


def test_address_0_skips_the_run_on_load(rig: Any) -> None:
    rig.stored([1])
    target = EngineMemory.whole(rig.geometry, [1])
    target.addresses[2] = 0
    assert (rig.store.load(target.ids, target.shards, target.addresses).wait() == Status.OK).all()
    assert [target.right(row) for row in range(4)] == [True, True, False, True]
    assert target.untouched(2)


def test_a_shard_named_twice(rig: Any) -> None:
    twice = EngineMemory(rig.geometry, [(1, 0), (1, 0)]).fill()
    with pytest.raises(ValueError, match="rows 0 and 1 dump the same shard 0"):
        rig.store.dump(twice.ids, twice.shards, twice.addresses)
    rig.stored([1])
    target = EngineMemory(rig.geometry, [(1, 0), (1, 0)])
    assert (rig.store.load(target.ids, target.shards, target.addresses).wait() == Status.OK).all()
    assert target.right(0) and target.right(1)


def test_empty_batches(rig: Any) -> None:
    none = EngineMemory(rig.geometry, [])
    ids = np.empty((0, 16), np.uint8)
    shards = np.empty(0, np.uint32)
    addresses = np.empty((0, 2), np.uint64)
    assert none.rows == []
    assert len(rig.store.lookup(ids)) == 0
    assert rig.store.lookup_on_prefix(ids) == rig.store.lookup_on_reverse(ids) == -1
    for task in (
        rig.store.load(ids, shards, addresses),
        rig.store.dump(ids, shards, addresses),
        rig.store.commit(ids),
    ):
        assert task.check() and len(task.wait()) == len(task.wait_durable()) == 0


def test_unknown_event(rig: Any) -> None:
    rows = EngineMemory.whole(rig.geometry, [1]).fill()
    with pytest.raises(ValueError, match="event 12345 is not known to device host"):
        rig.store.dump(rows.ids, rows.shards, rows.addresses, event=12345)


def test_unknown_commit_mode(rig: Any) -> None:
    rows = EngineMemory.whole(rig.geometry, [1]).fill()
    with pytest.raises(ValueError, match="7 is not a valid CommitMode"):
        rig.store.dump(rows.ids, rows.shards, rows.addresses, commit=7)


def test_wait_shard_out_of_range(rig: Any) -> None:
    rig.stored([1])
    target = EngineMemory(rig.geometry, [(1, 0)])
    task = rig.store.load(target.ids, target.shards, target.addresses)
    assert task.wait_shard(0) == Status.OK
    for index in (1, -1):
        with pytest.raises(IndexError, match="of a task of 1 rows"):
            task.wait_shard(index)


# Spec 3.8 item 11: an empty id never shifts the answers behind it.
def test_an_empty_id_is_an_error_not_a_gap(rig: Any) -> None:
    rig.stored([1, 2])
    ids = id_array([1, 1, 2])
    ids[1] = 0
    with pytest.raises(ValueError, match=r"ids\[1\]"):
        rig.store.lookup(ids)


def test_read_only_arrays_are_fine(rig: Any) -> None:
    rig.stored([1])
    ids = id_array([1])
    ids.flags.writeable = False
    assert rig.store.lookup(ids).all()


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(4, 100, 2, RunShape(64), ""),
        Geometry(0, 128, 2, RunShape(64), ""),
        Geometry(4, 0, 0, RunShape(64), ""),
    ],
)
def test_a_geometry_that_contradicts_itself(geometry: Geometry) -> None:
    with pytest.raises(ValueError, match="geometry"):
        native_geometry(geometry)
