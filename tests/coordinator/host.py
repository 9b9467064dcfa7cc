"""A serving process for tests of checkpoints: coordinator, stores, and an engine that is a checksum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ucm_core.coordinator import Coordinator, HitPlan, Positions
from ucm_core.identity import ContentChain, ModelIdentity
from ucm_core.spec import KeySpace, Retention, SnapshotKey, SpecTable
from ucm_core.store.contract import BlockStore, Status
from ucm_core.store.snapshot import SnapshotStore
from ucm_core.testing.blocks import geometry_of

if __package__:
    from .tables import chain, state, table
else:  # run as a process of its own
    from tables import chain, state, table

GRAIN = 16
MODEL = ModelIdentity("id:w", "bf16")
#: Of every row's objects.
GEOMETRY = geometry_of(1, 64, 1)
OpenRow = Callable[[str], BlockStore]


def hybrid(**retention: int | bool | None) -> SpecTable:
    """A chain row and two states on grids of 16 and 32."""
    kept = Retention(**retention)  # type: ignore[arg-type]
    return table(
        chain("kv", 16), state("a", 16, retention=kept), state("b", 32, entry_bytes=16), grain=GRAIN
    )


def prompt(*tokens: range) -> ContentChain:
    made = ContentChain(GRAIN)
    made.extend(np.concatenate([np.array(t, np.uint32) for t in tokens]))
    return made


class Host:
    """A serving process: a coordinator and its stores, one of ``GEOMETRY`` a row. States are a function
    of the prefix, so a wrong one is seen."""

    def __init__(self, rows: SpecTable, open_row: OpenRow, **options: int) -> None:
        self.keys = KeySpace(rows, MODEL)
        self.coordinator = Coordinator(self.keys, **options)
        self.blocks = {row.name: open_row(row.name) for row in rows.rows}
        self.snapshots = {row.name: SnapshotStore(self.blocks[row.name]) for row in rows.snapshots}
        self.asked = 0

    def hit(self, chain_: ContentChain, *, local: int = 0) -> HitPlan:
        plan = self.coordinator.plan(chain_, local=local)
        self.asked = sum(map(len, plan.ids.values()))
        answers = {name: self.blocks[name].lookup(ids) for name, ids in plan.ids.items()}
        return self.coordinator.decide(chain_, plan, answers, local=local)

    def serve(self, chain_: ContentChain) -> tuple[int, list[int]]:
        """Run a request: load its state, compute, save blocks and the states that shall be kept. Returns
        where it continued and where it left states. A load that fails costs a shorter hit."""
        hit = self.hit(chain_)
        for _ in range(8):
            if not hit.p_star or self.load_all(chain_, hit.p_star):
                break
            hit = self.hit(chain_)
        keep = self.coordinator.admit(chain_, hit)
        self.save_blocks(chain_)
        self.save(chain_, keep)
        return hit.p_star, keep.tolist()

    def load_all(self, chain_: ContentChain, position: int) -> bool:
        keys = self.coordinator.snapshots_at(chain_, position)
        failed = [key for key in keys if self.load(key) != Status.OK]
        for key in failed:
            self.coordinator.missed(key)
        return not failed

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
