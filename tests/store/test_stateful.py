"""The store against a dict: whatever is done, it tells exactly what a dict of whole objects would."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ucm_core import _native
from ucm_core.store.contract import CommitMode, Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.testing.blocks import EngineMemory, block_id, geometry_of, id_array

GEOMETRY = geometry_of(3, 64, 2)
ALL_SHARDS = frozenset(range(GEOMETRY.shard_count))
numbers = st.integers(0, 7)
some_numbers = st.lists(numbers, min_size=1, max_size=5, unique=True)
some_shards = st.sets(st.integers(0, GEOMETRY.shard_count - 1), min_size=1)
CORRUPT_FAULT = 2


class StoreMachine(RuleBasedStateMachine):
    """``stored``: whole objects on the medium. ``open``: id -> (shards in, explicit?)."""

    def __init__(self) -> None:
        super().__init__()
        self.medium = _native.FakeMedium()
        self.stored: set[int] = set()
        self.open: dict[int, tuple[set[int], bool]] = {}
        self.start()

    def start(self) -> None:
        native = native_geometry(GEOMETRY)
        self.stage = _native.FakeStage(native, self.medium)
        tier = _native.staging_tier(native, load_reserve=2, shared=10)
        options: dict[str, Any] = {"timeout_ms": 20_000, "waiting_depth": 100, "running_depth": 8}
        options |= {"copiers": 2, "write_retries": 1, "retry_delay_ms": 1, "open_age_ms": 0}
        self.store = NativeBlockStore(_native.Store(self.stage, tier, **options), GEOMETRY)

    def teardown(self) -> None:
        self.store.close()

    def settle(self) -> None:
        """Wait until what is complete is stored."""
        while self.store.stats()["store.objects_writing"]:
            time.sleep(0.0005)

    def became(self, number: int) -> None:
        """Publish ``number`` in the model if it is complete and not held back."""
        shards, explicit = self.open[number]
        if shards == ALL_SHARDS and not explicit:
            del self.open[number]
            self.stored.add(number)

    @rule(chosen=some_numbers, shards=some_shards, explicit=st.booleans())
    def dump(self, chosen: list[int], shards: set[int], explicit: bool) -> None:
        source = EngineMemory(GEOMETRY, [(n, s) for n in chosen for s in shards]).fill()
        mode = CommitMode.EXPLICIT if explicit else CommitMode.AUTO
        task = self.store.dump(source.ids, source.shards, source.addresses, commit=mode)
        assert (task.wait() == Status.OK).all()
        source.memory[:] = 0  # the source is free
        for number in chosen:
            have, held = self.open.get(number, (set(), False))
            self.open[number] = (have | shards, held or explicit)
            self.became(number)
        if any(n in self.open for n in chosen):
            self.settle()
        else:
            assert (task.wait_durable() == Status.OK).all()

    @rule(number=numbers)
    def commit(self, number: int) -> None:
        shards, _ = self.open.get(number, (set(ALL_SHARDS), False))
        task = self.store.commit(id_array([number]))
        if shards != ALL_SHARDS:  # it can only time out, and is discarded then
            assert task.wait(0.01).tolist() == [Status.TIMEOUT]
            del self.open[number]
            return
        if number in self.open:
            self.open[number] = (shards, False)
            self.became(number)
        expected = Status.OK if number in self.stored else Status.MISS
        assert task.wait_durable().tolist() == [expected]

    @rule(chosen=some_numbers)
    def discard(self, chosen: list[int]) -> None:
        self.store.discard(id_array(chosen))
        for number in chosen:
            self.open.pop(number, None)

    @rule(chosen=some_numbers, shards=some_shards, skip=st.booleans())
    def load(self, chosen: list[int], shards: set[int], skip: bool) -> None:
        target = EngineMemory(GEOMETRY, [(n, s) for n in chosen for s in sorted(shards)])
        if skip:
            target.addresses[0] = 0
        result = self.store.load(target.ids, target.shards, target.addresses).wait()
        for row, (number, _) in enumerate(target.rows):
            assert result[row] == (Status.OK if number in self.stored else Status.MISS)
            skipped = skip and row == 0
            assert (
                target.right(row)
                if number in self.stored and not skipped
                else target.untouched(row)
            )

    @rule(number=numbers)
    def load_corrupt(self, number: int) -> None:
        self.stage.inject(block_id(number), reads=True, fault=CORRUPT_FAULT)
        target = EngineMemory(GEOMETRY, [(number, 0)])
        result = self.store.load(target.ids, target.shards, target.addresses).wait()
        assert result[0] == (Status.CORRUPT if number in self.stored else Status.MISS)
        assert target.untouched(0)
        self.stored.discard(number)

    @rule(number=numbers)
    def deleted_by_somebody_else(self, number: int) -> None:
        self.medium.remove(block_id(number))
        self.stored.discard(number)

    @rule(chosen=some_numbers)
    def remove(self, chosen: list[int]) -> None:
        self.store.remove(id_array(chosen))
        self.stored -= set(chosen)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open.clear()
        self.start()

    @invariant()
    def lookups_agree(self) -> None:
        present = [n in self.stored for n in range(8)]
        ids = id_array(range(8))
        assert self.store.lookup(ids).tolist() == present
        first_miss = present.index(False) if False in present else 8
        assert self.store.lookup_on_prefix(ids) == first_miss - 1
        last_hit = max((n for n in range(8) if present[n]), default=-1)
        assert self.store.lookup_on_reverse(ids) == last_hit
        assert sorted(self.medium.ids()) == sorted(block_id(n) for n in self.stored)


StoreMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreAgainstDict = StoreMachine.TestCase
