"""What every storage stage must do, as an inheritable pytest suite.

A backend's tests subclass :class:`StageConformance`, give a factory and raw access that bypasses the
stage, and declare what the stage can do beyond the minimum. A capability that is declared is tested;
one that is not is tested for its documented refusal, so a gap that starts to work fails until it is
declared. :mod:`ucm_core.testing.canary` proves that the suite can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from ucm_core import _native
from ucm_core.store.contract import Geometry, Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.testing.blocks import EngineMemory, block_id, geometry_of, id_array

_TIMEOUT_MS = 20_000


class RawAccess(Protocol):
    """What is on the medium, seen and changed behind the stage's back."""

    def exists(self, id: bytes) -> bool: ...
    def delete(self, id: bytes) -> None: ...
    def corrupt(self, id: bytes, shard: int) -> None:
        """Change one byte of the stored shard."""

    def truncate(self, id: bytes) -> None:
        """Cut the stored object in its last shard."""

    def swap(self, a: bytes, b: bytes) -> None:
        """Exchange what is stored under two ids."""


class StageConformance:
    """Inherit, implement the three factories, set the flags."""

    #: Objects survive the stage: a new stage over the same medium finds them.
    persistent: bool = False
    #: Bytes of one object under the name of another are detected.
    detects_swap: bool = False
    #: Lookup asks the medium: an object deleted behind the stage's back is absent at once.
    sees_foreign_deletes: bool = False

    def make_medium(self, tmp_path: Path) -> Any:
        """What stages of one test share: a directory, a server, ..."""
        raise NotImplementedError

    def make_stage(self, medium: Any, geometry: Geometry) -> _native.Stage:
        raise NotImplementedError

    def raw(self, medium: Any, geometry: Geometry) -> RawAccess:
        raise NotImplementedError

    # ---- fixtures and helpers ----

    @pytest.fixture
    def medium(self, tmp_path: Path) -> Any:
        return self.make_medium(tmp_path)

    @pytest.fixture
    def geometry(self) -> Geometry:
        return geometry_of()

    @pytest.fixture
    def store(self, medium: Any, geometry: Geometry) -> Iterator[NativeBlockStore]:
        store = self.open(medium, geometry)
        yield store
        store.close()

    def open(self, medium: Any, geometry: Geometry) -> NativeBlockStore:
        stage = self.make_stage(medium, geometry)
        tier = _native.staging_tier(native_geometry(geometry), load_reserve=8, shared=24)
        native = _native.Store(
            stage,
            tier,
            timeout_ms=_TIMEOUT_MS,
            waiting_depth=10_000,
            running_depth=64,
            copiers=1,
            write_retries=0,
            retry_delay_ms=1,
            open_age_ms=0,
        )
        return NativeBlockStore(native, geometry)

    def dump(self, store: NativeBlockStore, numbers: range | list[int]) -> None:
        """Store whole objects; durable when this returns."""
        source = EngineMemory.whole(store.geometry, numbers).fill()
        result = store.dump(source.ids, source.shards, source.addresses).wait_durable()
        assert (result == Status.OK).all(), f"dump: {result}"

    def load(
        self, store: NativeBlockStore, rows: list[tuple[int, int]]
    ) -> tuple[EngineMemory, npt.NDArray[np.uint8]]:
        """Load rows and check that what was not OK was not touched, and that OK means right bytes."""
        target = EngineMemory(store.geometry, rows)
        result = store.load(target.ids, target.shards, target.addresses).wait()
        for row, status in enumerate(result):
            if status == Status.OK:
                assert target.right(row), f"row {rows[row]}: wrong bytes delivered as OK"
            else:
                assert target.untouched(row), f"row {rows[row]}: {Status(status).name}, yet written"
        return target, result

    def whole(self, store: NativeBlockStore, number: int) -> list[tuple[int, int]]:
        return [(number, s) for s in range(store.geometry.shard_count)]

    # ---- bytes ----

    def test_what_was_dumped_comes_back(self, store: NativeBlockStore) -> None:
        self.dump(store, range(40))
        rows = [row for n in reversed(range(40)) for row in self.whole(store, n)]
        assert (self.load(store, rows)[1] == Status.OK).all()

    def test_single_shards_come_back(self, store: NativeBlockStore) -> None:
        self.dump(store, range(8))
        last = store.geometry.shard_count - 1
        rows = [(n, s) for n in range(8) for s in sorted({0, n % (last + 1), last})]
        assert (self.load(store, rows)[1] == Status.OK).all()

    @pytest.mark.parametrize(
        "geometry",
        [
            geometry_of(1, 4096, 1),
            geometry_of(3, 1000, 3),
            geometry_of(17, 1, 1),
            geometry_of(2, 96 * 1024, 2),
        ],
        ids=["one-shard", "odd", "tiny", "large"],
    )
    def test_any_geometry(self, medium: Any, geometry: Geometry) -> None:
        store = self.open(medium, geometry)
        self.dump(store, range(5))
        rows = [row for n in range(5) for row in self.whole(store, n)]
        assert (self.load(store, rows)[1] == Status.OK).all()
        store.close()

    def test_results_are_per_object(self, store: NativeBlockStore) -> None:
        self.dump(store, [0, 2, 4])
        _, result = self.load(store, [(n, 1) for n in range(5)])
        expected = [Status.OK, Status.MISS, Status.OK, Status.MISS, Status.OK]
        assert result.tolist() == expected

    def test_storing_again_is_success(self, store: NativeBlockStore) -> None:
        for _ in range(3):
            self.dump(store, range(4))
        assert store.lookup(id_array(range(4))).all()

    def test_one_object_from_two_stores_at_once(self, medium: Any, geometry: Geometry) -> None:
        stores = [self.open(medium, geometry) for _ in range(2)]
        for round_ in range(5):
            numbers = range(round_ * 10, round_ * 10 + 10)
            sources = [EngineMemory.whole(geometry, numbers).fill() for _ in stores]
            tasks = [
                store.dump(m.ids, m.shards, m.addresses)
                for store, m in zip(stores, sources, strict=True)
            ]
            assert all((task.wait_durable() == Status.OK).all() for task in tasks)
            rows = [row for n in numbers for row in self.whole(stores[0], n)]
            assert (self.load(stores[0], rows)[1] == Status.OK).all()
        for store in stores:
            store.close()

    # ---- lookup ----

    def test_lookup_answers_in_order(self, store: NativeBlockStore) -> None:
        here = [1, 2, 5, 9]
        self.dump(store, here)
        expected = [n in here for n in range(12)]
        assert store.lookup(id_array(range(12))).tolist() == expected
        assert store.lookup(id_array(reversed(range(12)))).tolist() == expected[::-1]

    def test_lookup_of_many(self, store: NativeBlockStore) -> None:
        self.dump(store, range(0, 100, 3))
        got = store.lookup(id_array(range(1000)))
        assert np.flatnonzero(got).tolist() == list(range(0, 100, 3))

    def test_prefix_and_reverse(self, store: NativeBlockStore) -> None:
        self.dump(store, [0, 1, 2, 4])
        assert store.lookup_on_prefix(id_array(range(6))) == 2
        assert store.lookup_on_prefix(id_array([3, 0])) == -1
        assert store.lookup_on_reverse(id_array(range(6))) == 4
        assert store.lookup_on_reverse(id_array([3, 5])) == -1

    def test_an_incomplete_object_is_absent(self, store: NativeBlockStore, medium: Any) -> None:
        part = EngineMemory(store.geometry, [(1, store.geometry.shard_count - 1)]).fill()
        store.dump(part.ids, part.shards, part.addresses).wait()
        assert not store.lookup(id_array([1])).any()
        assert not self.raw(medium, store.geometry).exists(block_id(1))
        assert self.load(store, self.whole(store, 1))[1].tolist() == [Status.MISS] * 4

    # ---- damage behind the stage's back ----

    def test_a_deleted_object_is_a_miss(self, store: NativeBlockStore, medium: Any) -> None:
        self.dump(store, [1, 2])
        self.raw(medium, store.geometry).delete(block_id(1))
        assert store.lookup(id_array([1]))[0] != self.sees_foreign_deletes
        _, result = self.load(store, [(1, 0), (2, 0)])
        assert result.tolist() == [Status.MISS, Status.OK]

    def test_damage_is_never_delivered_and_heals(
        self, store: NativeBlockStore, medium: Any
    ) -> None:
        raw = self.raw(medium, store.geometry)
        last = store.geometry.shard_count - 1
        for shard in (0, last):
            self.dump(store, [1])
            raw.corrupt(block_id(1), shard)
            _, result = self.load(store, self.whole(store, 1))
            assert result[shard] in (Status.CORRUPT, Status.MISS)
            assert not raw.exists(block_id(1)), "a corrupt object must be removed"
            assert not store.lookup(id_array([1])).any()
        self.dump(store, [1])
        assert (self.load(store, self.whole(store, 1))[1] == Status.OK).all()

    def test_a_short_object_is_never_delivered(self, store: NativeBlockStore, medium: Any) -> None:
        self.dump(store, [1])
        self.raw(medium, store.geometry).truncate(block_id(1))
        _, result = self.load(store, self.whole(store, 1))
        assert result[-1] in (Status.CORRUPT, Status.MISS)
        self.dump(store, [1])
        assert (self.load(store, self.whole(store, 1))[1] == Status.OK).all()

    def test_swapped_objects(self, store: NativeBlockStore, medium: Any) -> None:
        self.dump(store, [1, 2])
        self.raw(medium, store.geometry).swap(block_id(1), block_id(2))
        target = EngineMemory(store.geometry, [(1, 0), (2, 0)])
        result = store.load(target.ids, target.shards, target.addresses).wait()
        delivered = bool((result == Status.OK).any())
        assert delivered != self.detects_swap

    def test_another_geometry_reads_nothing(self, medium: Any, geometry: Geometry) -> None:
        store = self.open(medium, geometry)
        self.dump(store, [1])
        store.close()
        half = geometry_of(geometry.shard_count // 2, geometry.run.nbytes, geometry.runs_per_shard)
        other = self.open(medium, half)
        assert not (self.load(other, self.whole(other, 1))[1] == Status.OK).any()
        other.close()

    # ---- life ----

    def test_removed_objects_are_absent(self, store: NativeBlockStore, medium: Any) -> None:
        self.dump(store, [1, 2])
        store.remove(id_array([1, 7]))
        assert store.lookup(id_array([1, 2])).tolist() == [False, True]
        assert not self.raw(medium, store.geometry).exists(block_id(1))

    def test_objects_survive_the_stage(self, medium: Any, geometry: Geometry) -> None:
        store = self.open(medium, geometry)
        self.dump(store, range(6))
        store.close()
        again = self.open(medium, geometry)
        assert bool(again.lookup(id_array(range(6))).all()) == self.persistent
        _, result = self.load(again, [(n, 0) for n in range(6)])
        assert bool((result == Status.OK).all()) == self.persistent
        again.close()

    def test_close_ends_what_runs(self, medium: Any, geometry: Geometry) -> None:
        store = self.open(medium, geometry)
        source = EngineMemory.whole(geometry, range(20)).fill()
        task = store.dump(source.ids, source.shards, source.addresses)
        store.close()
        assert (task.wait_durable() != Status.PENDING).all()
        store.close()

    def test_touch_and_prefetch_oblige_to_nothing(self, store: NativeBlockStore) -> None:
        self.dump(store, [1])
        store.touch(id_array([1, 2, 3]))
        store.prefetch(id_array([1, 2, 3]))
        assert store.lookup(id_array([1, 2, 3])).tolist() == [True, False, False]

    def test_it_reports(self, store: NativeBlockStore) -> None:
        self.dump(store, [1])
        assert all(health == "" for health in store.health().values()), store.health()
        stats = store.stats()
        assert stats["store.written_objects_total"] == 1
        assert all(isinstance(value, int) for value in stats.values())
