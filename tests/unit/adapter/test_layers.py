"""The layer pipeline: what is in place when, what is saved when, and what nobody called for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ucm_core.adapter.layers import LayerLoads, LayerSaves, LookAhead, RowTransfer
from ucm_core.adapter.transfer import BlockTransfer, reasons
from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.errors import FullError
from ucm_core.spec import TARGET, Kind, LayerSpec, SpecTable
from ucm_core.store.contract import CommitMode, Status, TaskState

LAYERS = 5
KEYS = [LayerKey(TARGET, i) for i in range(LAYERS)]


class Task:
    """Done when it is waited for; ``results`` are what was planned."""

    def __init__(self, results: np.ndarray) -> None:
        self.results = results
        self.waited = False
        self.cancelled = False

    def check(self, timeout_s: float = 0.0) -> bool:
        return self.waited or self.cancelled

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        self.waited = True
        return self.results

    def durable_results(self) -> np.ndarray:
        return self.results

    def errnos(self) -> np.ndarray:
        return np.where(self.results == Status.IO_ERROR, 5, 0).astype(np.int32)

    durable_errnos = errnos

    def state(self) -> TaskState:
        return TaskState.DURABLE if (self.results == Status.OK).all() else TaskState.FAILED

    def cancel(self) -> None:
        self.cancelled = True


class Store:
    """Notes every submission: (verb, ids, shards, commit mode), in order."""

    def __init__(self, bad: dict[tuple[int, int], Status] | None = None) -> None:
        self.bad = bad or {}
        self.calls: list[tuple[str, list[int], list[int], Any]] = []
        self.tasks: list[Task] = []
        self.events: list[int] = []
        self.full = False

    def _submit(
        self, verb: str, ids: np.ndarray, shards: np.ndarray, at: np.ndarray, how: Any
    ) -> Task:
        if self.full:
            raise FullError("the queue is full")
        assert ids.flags.c_contiguous and at.flags.c_contiguous
        assert ids.dtype == np.uint8 and shards.dtype == np.uint32 and at.dtype == np.uint64
        # Block b, shard s, run r is at 1000 * b + 10 * s + r.
        wanted = 1000 * ids[:, :1].astype(np.uint64) + 10 * shards[:, None].astype(np.uint64)
        assert (at == wanted + np.arange(at.shape[1], dtype=np.uint64)).all()
        rows = [(int(i), int(s)) for i, s in zip(ids[:, 0], shards, strict=True)]
        self.calls.append((verb, [i for i, _ in rows], [s for _, s in rows], how))
        self.tasks.append(Task(np.array([self.bad.get(r, Status.OK) for r in rows], np.uint8)))
        return self.tasks[-1]

    def load(self, ids: np.ndarray, shards: np.ndarray, at: np.ndarray, *, event: int = 0) -> Task:
        self.events.append(event)
        return self._submit("load", ids, shards, at, None)

    def dump(
        self, ids: np.ndarray, shards: np.ndarray, at: np.ndarray, *, event: int = 0, commit: Any
    ) -> Task:
        return self._submit("dump", ids, shards, at, commit)

    @property
    def shards(self) -> list[list[int]]:
        """Shards of each submission."""
        return [shards for _, _, shards, _ in self.calls]


def _transfer(store: Any, blocks: list[int], shards: int = LAYERS) -> BlockTransfer:
    ids = np.zeros((len(blocks), 16), np.uint8)
    ids[:, 0] = blocks
    at = np.array(blocks, np.uint64)[:, None, None] * 1000
    at = at + np.arange(shards, dtype=np.uint64)[:, None] * 10 + np.arange(2, dtype=np.uint64)
    return BlockTransfer(store, ids, np.ascontiguousarray(at))


def _units(called: list[int] | None = None, tensors: list[list[int]] = []) -> UnitMap:  # noqa: B006
    layers = [LayerSpec(i, f"l{i}", Kind.CHAIN, entry_bytes=8, dtype="fp32") for i in range(LAYERS)]
    return UnitMap(
        SpecTable.from_layers(layers, grain=4),
        {TARGET: range(LAYERS)},
        called=None if called is None else [KEYS[i] for i in called],
        tensors=[[KEYS[i] for i in tensor] for tensor in tensors],
    )


def _row(units: UnitMap) -> str:
    (row,) = units.by_row
    return row


def _loads(store: Any, units: UnitMap, ahead: int = 2) -> tuple[LayerLoads, RowTransfer]:
    moved = RowTransfer(_row(units), _transfer(store, [7, 9]))
    return LayerLoads(units, [moved], LookAhead(ahead)), moved


def test_a_layer_waits_for_its_own_shard_and_looks_ahead() -> None:
    store = Store()
    loads, moved = _loads(store, _units())
    assert store.shards == [[0, 0], [1, 1]]
    loads.wait(KEYS[0])
    assert store.shards[2:] == [[2, 2]]
    assert [task.waited for task in store.tasks] == [True, False, False]
    for key in KEYS[1:]:
        loads.wait(key)
    loads.finish()
    assert store.shards == [[i, i] for i in range(LAYERS)]
    assert not moved.missed
    assert list(moved.transfer.statuses()) == [Status.OK, Status.OK]


def test_every_load_of_a_step_comes_after_what_was_queued_before_it() -> None:
    store, units, event = Store(), _units(), object()
    moved = RowTransfer(_row(units), _transfer(store, [7, 9]))
    loads = LayerLoads(units, [moved], LookAhead(1), after=(42, event))
    for key in KEYS:
        loads.wait(key)
    assert store.events == [42] * LAYERS
    assert event in moved.transfer.kept, "it lives as long as the tasks"


def test_repeated_calls_wait_once() -> None:
    store = Store()
    loads, _ = _loads(store, _units(), ahead=1)
    for _ in range(3):
        loads.wait(KEYS[0])
        loads.wait(KEYS[1])
    loads.wait(KEYS[0])
    assert store.shards == [[0, 0], [1, 1], [2, 2]]


def test_a_layer_that_did_not_ask_spoils_its_blocks() -> None:
    """A graph replayed whole: the layer has computed on what was not there."""
    for asked in ([], [0, 1, 2, 3], [0, 2, 3, 4], [1, 2, 3, 4]):
        loads, moved = _loads(Store(), _units())
        for i in asked:
            loads.wait(KEYS[i])
        loads.finish()
        loads.finish()
        assert moved.missed, asked
        assert all(task.waited or task.cancelled for task in moved.transfer.store.tasks)  # type: ignore[attr-defined]


def test_layers_without_a_call_are_waited_for_earlier() -> None:
    """Calls for layers 1 and 4 only: 0 is there from the start, 2 and 3 when 1 asks."""
    store = Store()
    loads, moved = _loads(store, _units(called=[1, 4]), ahead=1)
    assert store.tasks[0].waited
    assert store.shards[0] == [0, 0]
    loads.wait(KEYS[1])
    assert [task.waited for task in store.tasks] == [True, True, True, True, False]
    loads.wait(KEYS[4])
    loads.finish()
    assert not moved.missed


def test_layers_of_one_tensor_are_one_unit() -> None:
    store = Store()
    units = _units(tensors=[[1, 2, 3]])
    loads, moved = _loads(store, units, ahead=1)
    for key in KEYS:
        loads.wait(key)
    loads.finish()
    assert not moved.missed
    assert store.shards == [[0, 0], [1, 2, 3, 1, 2, 3], [4, 4]]
    saved = Store()
    saves = LayerSaves(units, [RowTransfer(_row(units), _transfer(saved, [7]))])
    for key in KEYS[:3]:
        saves.save(key)
    assert saved.shards == [[0]]
    saves.save(KEYS[3])
    assert saved.shards == [[0], [1, 2, 3]]


def test_a_failed_shard_makes_its_block_bad_and_no_other() -> None:
    store = Store({(9, 3): Status.IO_ERROR})
    loads, moved = _loads(store, _units())
    for key in KEYS:
        loads.wait(key)
    loads.finish()
    assert list(moved.transfer.statuses()) == [Status.OK, Status.IO_ERROR]
    assert reasons([moved.transfer], durable=False).startswith(": io_error EIO")


def test_saves_happen_once_and_none_is_forgotten() -> None:
    store = Store()
    units = _units()
    moved = RowTransfer(_row(units), _transfer(store, [7]))
    saves = LayerSaves(units, [moved], CommitMode.EXPLICIT)
    for i in (0, 0, 3, 0):
        saves.save(KEYS[i])
    assert store.shards == [[0], [3]]
    saves.finish()
    assert store.shards == [[0], [3], [1, 2], [4]]
    saves.finish()
    saves.save(KEYS[1])
    assert len(store.calls) == 4
    assert {how for _, _, _, how in store.calls} == {CommitMode.EXPLICIT}


def test_a_block_without_room_is_not_tried_layer_by_layer() -> None:
    store = Store({(9, 0): Status.REJECTED})
    units = _units()
    moved = RowTransfer(_row(units), _transfer(store, [7, 9, 11]))
    saves = LayerSaves(units, [moved])
    for key in KEYS:
        saves.save(key)
    assert [ids for _, ids, _, _ in store.calls] == [[7, 9, 11], *[[7, 11]] * (LAYERS - 1)]
    assert list(moved.transfer.statuses(durable=True)) == [Status.OK, Status.REJECTED, Status.OK]


def test_a_store_that_refuses_is_a_result() -> None:
    store = Store()
    store.full = True
    transfer = _transfer(store, [7, 9])
    assert transfer.load(range(LAYERS)) is None
    assert transfer.is_over()
    assert list(transfer.statuses()) == [Status.REJECTED] * 2
    assert "refused: the queue is full" in reasons([transfer], durable=False)


@pytest.mark.parametrize(
    ("load_s", "compute_s", "layers"),
    [(0.001, 0.01, 1), (0.03, 0.01, 4), (10.0, 0.001, LookAhead.MOST)],
)
def test_look_ahead_follows_the_measured_ratio(
    load_s: float, compute_s: float, layers: int
) -> None:
    ahead = LookAhead()
    assert ahead.layers == LookAhead.START
    for _ in range(50):
        ahead.loaded(load_s)
        ahead.computed(compute_s)
    assert abs(ahead.layers - layers) <= 1
    assert LookAhead(7).layers == 7
