"""The whole life of checkpoints over real snapshot stores: made, found cold, evicted, given up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ucm_core import _native
from ucm_core.coordinator import Computation, Coordinator, HitPlan, Positions
from ucm_core.identity import ContentChain, ModelIdentity
from ucm_core.spec import KeySpace, Retention, SnapshotKey, SpecTable
from ucm_core.store.contract import Geometry, Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.store.snapshot import SnapshotStore
from ucm_core.testing.blocks import geometry_of

from .tables import chain, state, table

GRAIN = 16
MODEL = ModelIdentity("id:w", "bf16")


def hybrid(**retention: int | bool | None) -> SpecTable:
    kept = Retention(**retention)  # type: ignore[arg-type]
    return table(
        chain("kv", 16), state("a", 16, retention=kept), state("b", 32, entry_bytes=16), grain=GRAIN
    )


class Media:
    """What survives a restart, and is shared by machines: one medium per row."""

    def __init__(self, rows: SpecTable) -> None:
        self.of = {row.name: _native.FakeMedium() for row in rows.rows}


class Host:
    """A serving process: a coordinator and its stores over shared media. States are a function of the
    prefix, so a wrong one is seen."""

    def __init__(self, rows: SpecTable, media: Media, **options: int) -> None:
        self.keys = KeySpace(rows, MODEL)
        self.coordinator = Coordinator(self.keys, **options)
        self.blocks = {row.name: self._open(row.name, media) for row in rows.rows}
        self.snapshots = {row.name: SnapshotStore(self.blocks[row.name]) for row in rows.snapshots}
        self.asked = 0

    def _open(self, name: str, media: Media) -> NativeBlockStore:
        geometry: Geometry = geometry_of(1, 64, 1)
        native = native_geometry(geometry)
        tier = _native.staging_tier(native, load_reserve=4, shared=60)
        options = {"timeout_ms": 20_000, "waiting_depth": 1000, "running_depth": 8, "copiers": 1}
        options |= {"write_retries": 0, "retry_delay_ms": 1, "open_age_ms": 0}
        stage = _native.FakeStage(native, media.of[name])
        return NativeBlockStore(_native.Store(stage, tier, **options), geometry)

    def hit(self, chain_: ContentChain, *, local: int = 0) -> HitPlan:
        plan = self.coordinator.plan(chain_, local=local)
        self.asked = sum(map(len, plan.ids.values()))
        answers = {name: self.blocks[name].lookup(ids) for name, ids in plan.ids.items()}
        return self.coordinator.decide(chain_, plan, answers, local=local)

    def serve(self, chain_: ContentChain) -> tuple[HitPlan, list[int]]:
        """Run a request: load its state, compute, save blocks and the states that shall be kept."""
        hit = self.hit(chain_)
        if hit.p_star:
            for key in self.coordinator.snapshots_at(chain_, hit.p_star):
                if self.load(key) != Status.OK:
                    self.coordinator.missed(key)
                    hit = self.hit(chain_)
        keep = self.coordinator.admit(chain_, hit)
        self.save_blocks(chain_)
        self.save(chain_, keep)
        return hit, keep.tolist()

    def save_blocks(self, chain_: ContentChain) -> None:
        (at,) = self.keys.of("kv")
        ids = self.keys.block_ids(at, chain_)
        memory = np.zeros((len(ids), 64), np.uint8)
        where = (memory.ctypes.data + 64 * np.arange(len(ids))).astype(np.uint64)[:, None]
        task = self.blocks["kv"].dump(ids, np.zeros(len(ids), np.uint32), where)
        assert (task.wait_durable() == Status.OK).all()

    def save(self, chain_: ContentChain, keep: Positions) -> None:
        for position in keep:
            for key in self.coordinator.snapshots_at(chain_, int(position)):
                self.put(key)
                for gone in self.coordinator.stored(key):
                    self.snapshots[gone.group].remove(self.keys.snapshot_ids(gone))

    def put(self, key: SnapshotKey) -> None:
        memory = content(key)
        where = np.array([[[memory.ctypes.data]]], np.uint64)
        task = self.snapshots[key.group].put(self.keys.snapshot_ids(key), where)
        assert task.wait_durable().tolist() == [Status.OK]

    def load(self, key: SnapshotKey) -> Status:
        memory = np.zeros(64, np.uint8)
        where = np.array([[[memory.ctypes.data]]], np.uint64)
        (status,) = self.snapshots[key.group].get(self.keys.snapshot_ids(key), where).wait()
        if status == Status.OK:
            assert (memory == content(key)).all()
        return Status(status)

    def remove(self, key: SnapshotKey) -> None:
        self.snapshots[key.group].remove(self.keys.snapshot_ids(key))

    def close(self) -> None:
        for store in self.blocks.values():
            store.close()


def content(key: SnapshotKey) -> np.ndarray:
    seed = (int.from_bytes(key.link[:8], "little"), key.position, ord(key.group))
    return np.random.default_rng(seed).integers(0, 256, 64, dtype=np.uint8)


def prompt(*tokens: range) -> ContentChain:
    made = ContentChain(GRAIN)
    made.extend(np.concatenate([np.array(t, np.uint32) for t in tokens]))
    return made


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    opened: list[Host] = []
    yield opened
    for host in opened:
        host.close()


def test_c_a_conversation(hosts: list[Host]) -> None:
    """Interval 64, grid 32: made once, served after, branches get one at their shared boundary."""
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows))
    hosts.append(host)
    first = prompt(range(330))
    assert host.serve(first) == (host_plan(0), [64, 128, 192, 256, 320])
    again, keep = host.serve(first)
    assert (again.p_star, keep) == (320, [])
    branch, keep = host.serve(prompt(range(200), range(1000, 1150)))
    assert (branch.p_star, keep) == (192, [256, 320])


class host_plan:
    """Equal to a plan that continues at ``p_star``."""

    def __init__(self, p_star: int) -> None:
        self.p_star = p_star

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HitPlan) and other.p_star == self.p_star

    __hash__ = None  # type: ignore[assignment]


def test_second_unserved_appearance_of_a_prefix(hosts: list[Host]) -> None:
    """Three users of one system prompt of 200 tokens, only ends are kept: the second makes the
    checkpoint at 192 and the third is served from it."""
    rows = hybrid()
    host = Host(rows, Media(rows))
    hosts.append(host)
    users = [prompt(range(200), range(1000 * n, 1000 * n + 100)) for n in (1, 2, 3, 4)]
    assert host.serve(users[0]) == (host_plan(0), [288])
    assert host.serve(users[1]) == (host_plan(0), [192, 288])
    assert host.serve(users[2]) == (host_plan(192), [288])
    assert host.serve(users[3]) == (host_plan(192), [288])


def test_reuse_survives_a_restart_and_crosses_machines(hosts: list[Host]) -> None:
    """The other host has no directory entry at all: positions on the grid are asked in the store."""
    rows = hybrid(interval=64)
    media = Media(rows)
    first, second = Host(rows, media), Host(rows, media)
    hosts += [first, second]
    chain_ = prompt(range(330))
    first.serve(chain_)
    assert all(len(d) == 0 for d in second.coordinator.directories.values())
    assert second.serve(chain_) == (host_plan(320), [])
    assert second.hit(prompt(range(150), range(900, 950))).p_star == 128
    assert second.hit(prompt(range(1, 331))).p_star == 0
    # without grid lookups a cold directory finds nothing, a warm one everything
    cold = Host(rows, media, grid_lookups=0)
    hosts.append(cold)
    assert cold.hit(chain_).p_star == 0
    for key in first.coordinator.snapshots_at(chain_, 256):
        cold.coordinator.stored(key)
    assert cold.hit(chain_).p_star == 256


def test_a_directory_saves_lookups_but_is_never_believed(hosts: list[Host]) -> None:
    """Eviction notifies nobody: the entry stays, the store says no, and the hit is shorter."""
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows), grid_lookups=0)
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    assert host.asked == 20  # chain blocks alone: the directory was empty
    host.hit(chain_)
    assert host.asked == 20 + 2 * 5
    key_a, _ = host.coordinator.snapshots_at(chain_, 320)
    host.remove(key_a)
    assert host.hit(chain_).p_star == 256  # b still has 320, which is of no use


def test_a_get_that_misses_removes_the_entry_and_recomputes(hosts: list[Host]) -> None:
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows))
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    plan = host.coordinator.plan(chain_)
    answers = {name: host.blocks[name].lookup(ids) for name, ids in plan.ids.items()}
    hit = host.coordinator.decide(chain_, plan, answers)
    assert hit.p_star == 320
    key, _ = host.coordinator.snapshots_at(chain_, 320)
    host.remove(key)  # between decision and load
    assert host.load(key) is Status.MISS
    host.coordinator.missed(key)
    assert host.coordinator.directories["a"].positions(chain_).tolist() == [64, 128, 192, 256]
    assert host.coordinator.stats()["checkpoints_missed_total"] == 1
    assert host.hit(chain_).p_star == 256
    assert host.serve(chain_) == (host_plan(256), [320])  # computed again, kept again
    assert host.hit(chain_).p_star == 320


def test_evicted_chain_puts_checkpoints_out_of_reach(hosts: list[Host]) -> None:
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows))
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    (at,) = host.keys.of("kv")
    host.blocks["kv"].remove(host.keys.block_ids(at, chain_, 9, 10))
    hit = host.hit(chain_)
    assert (hit.l, hit.p_star) == (144, 128)


def test_a_budget_keeps_what_is_used(hosts: list[Host]) -> None:
    """Room for three checkpoints (of 8 bytes; the other row has no budget). The one that requests
    continue from stays, through ten one-off prompts; what is given up is gone from every store."""
    rows = hybrid(budget_bytes=24)
    media = Media(rows)
    host = Host(rows, media)
    hosts.append(host)
    system = prompt(range(100))
    host.serve(system)
    for n in range(1, 11):
        hit, _ = host.serve(prompt(range(100), range(1000 * n, 1000 * n + 60)))
        assert hit.p_star == 96
        assert len(media.of["a"]) <= 3 and len(media.of["b"]) <= 3
    assert host.coordinator.stats()["checkpoints_evicted_total"] == 8
    assert host.coordinator.stats()["checkpoint_directory_entries"] == 6


def test_local_hits_and_finish(hosts: list[Host]) -> None:
    """Nothing below what the engine has is asked for; generated tokens move the end on."""
    rows = hybrid()
    host = Host(rows, Media(rows))
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    hit = host.hit(chain_, local=200)
    assert (hit.p_star, hit.external) == (320, 120)
    assert host.asked == 8 + 2 * 4  # blocks from 192 on, positions 224 .. 320
    assert host.hit(chain_, local=325).external == 0
    chain_.extend(np.arange(5000, 5100, dtype=np.uint32))
    assert host.coordinator.finish(chain_, 320).tolist() == [416]


def test_heat_names_what_a_hit_uses(hosts: list[Host]) -> None:
    rows = hybrid(interval=64)
    host = Host(rows, Media(rows))
    hosts.append(host)
    chain_ = prompt(range(330))
    host.serve(chain_)
    hit = host.hit(chain_)
    used = host.coordinator.heat(chain_, hit)
    assert {name: len(ids) for name, ids in used.items()} == {"kv": 20, "a": 1, "b": 1}
    assert all(host.blocks[name].lookup(ids).all() for name, ids in used.items())
    nothing = host.coordinator.heat(chain_, host.hit(prompt(range(7000, 7100))))
    assert {name: len(ids) for name, ids in nothing.items()} == {"kv": 0}


def test_a_policy_of_ones_own() -> None:
    class Never:
        def positions(self, table: SpecTable, work: Computation) -> Positions:
            return np.empty(0, np.int64)

    coordinator = Coordinator(KeySpace(hybrid(interval=16), MODEL), policy=Never())
    plan = coordinator.plan(prompt(range(100)))
    answers = {name: np.zeros(len(ids), np.bool_) for name, ids in plan.ids.items()}
    hit = coordinator.decide(prompt(range(100)), plan, answers)
    assert coordinator.admit(prompt(range(100)), hit).tolist() == []


def test_positions_off_the_grain_are_refused() -> None:
    coordinator = Coordinator(KeySpace(hybrid(), MODEL))
    for position in (0, 17):
        with pytest.raises(ValueError, match="grain"):
            coordinator.snapshots_at(prompt(range(100)), position)


def test_models_without_states_cost_nothing() -> None:
    coordinator = Coordinator(KeySpace(table(chain("kv", 16), grain=GRAIN), MODEL))
    chain_ = prompt(range(100))
    plan = coordinator.plan(chain_)
    hit = coordinator.decide(chain_, plan, {"kv": 4})
    assert hit.p_star == 64
    assert coordinator.admit(chain_, hit).tolist() == []
    assert coordinator.finish(chain_, 64).tolist() == []
