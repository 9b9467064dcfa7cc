"""A block store in a dictionary, with the contract's rules and completion by hand.

Copies really happen (ctypes), at the moment the test says so: a dump's source is read when it is
*copied*, a load's target is written when the load is *released*.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np

from ucm_core.store.contract import CommitMode, Geometry, Status, TaskState


class MemoryTask:
    def __init__(self, store: MemoryStore, kind: str, ids, shards, addresses) -> None:  # type: ignore[no-untyped-def]
        self.store, self.kind = store, kind
        self.ids = [bytes(row) for row in ids]
        self.shards, self.addresses = shards.copy(), addresses.copy()
        self.results = np.full(len(ids), Status.PENDING, dtype=np.uint8)
        #: What the last stage said of each row's object; PENDING while it has not.
        self.stored = np.full(len(ids), Status.PENDING, dtype=np.uint8)

    # what the store does
    def run(self, statuses: dict[bytes, Status] | None = None) -> None:
        """Move the bytes of every row still open (loads: then the task is done)."""
        geometry = self.store.geometry
        for row in np.flatnonzero(self.results == Status.PENDING):
            key, shard = self.ids[row], int(self.shards[row])
            status = (statuses or {}).get(key, Status.OK)
            if status is Status.OK and self.kind == "load":
                data = self.store.objects.get(key)
                if data is None or any(part is None for part in data):
                    status = Status.MISS
                else:
                    _scatter(geometry, data[shard], self.addresses[row])
            elif status is Status.OK:
                staged = self.store.staged.setdefault(key, [None] * geometry.shard_count)
                staged[shard] = _gather(geometry, self.addresses[row])
            self.results[row] = status

    def finish(self) -> None:
        """Dumps: objects that are whole, and committed where that is asked for, become visible."""
        for key in dict.fromkeys(self.ids):
            self.store.publish(key)

    # the contract
    def check(self, timeout_s: float = 0.0) -> bool:
        if timeout_s:
            self.store.patience.append(timeout_s)
        return bool((self.results != Status.PENDING).all())

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        self.store.waits.append(timeout_s)
        if timeout_s != 0.0 and not self.check() and self.store.copy_when_waited:
            self.run(self.store.faults)
        self._give_up(Status.TIMEOUT)
        return self.results

    def _give_up(self, status: Status) -> None:
        """A dump that loses a source loses its whole object, unless it was published already."""
        lost = np.flatnonzero(self.results == Status.PENDING)
        self.results[lost] = status
        for key in {self.ids[row] for row in lost} if self.kind == "dump" else ():
            self.store.drop(key, status)

    def wait_shard(self, index: int, timeout_s: float | None = None) -> Status:
        return Status(int(self.wait(timeout_s)[index]))

    def wait_durable(self, timeout_s: float | None = None) -> np.ndarray:
        return self.wait(timeout_s)

    def durable_errnos(self) -> np.ndarray:
        return np.zeros(len(self.ids), dtype=np.int32)

    def durable_results(self) -> np.ndarray:
        return np.where(self.results == Status.OK, self.stored, self.results).astype(np.uint8)

    def errnos(self) -> np.ndarray:
        return np.zeros(len(self.results), dtype=np.int32)

    def state(self) -> TaskState:
        if not self.check():
            return TaskState.SUBMITTED
        said = self.durable_results()
        if ((said != Status.OK) & (said != Status.PENDING)).any():
            return TaskState.FAILED
        return TaskState.DURABLE if (said == Status.OK).all() else TaskState.IN_BACKEND

    def cancel(self) -> None:
        self._give_up(Status.CANCELLED)


def _gather(geometry: Geometry, row: np.ndarray) -> bytes:
    shapes, parts = (geometry.run, *geometry.more_runs), []
    for index, address in enumerate(row):
        run = shapes[index % len(shapes)]
        assert address, "a dump must not have address 0"
        parts += [
            ctypes.string_at(int(address) + i * run.stride, run.nbytes) for i in range(run.count)
        ]
    return b"".join(parts)


def _scatter(geometry: Geometry, data: bytes, row: np.ndarray) -> None:
    shapes, at = (geometry.run, *geometry.more_runs), 0
    for index, address in enumerate(row):
        run = shapes[index % len(shapes)]
        for i in range(run.count):
            if address:
                ctypes.memmove(
                    int(address) + i * run.stride, data[at : at + run.nbytes], run.nbytes
                )
            at += run.nbytes


class MemoryStore:
    """``auto``: every task is done when it is submitted. Else tests call ``run`` and ``finish``."""

    def __init__(self, geometry: Geometry, *, auto: bool = True) -> None:
        self.geometry = geometry
        self.auto = auto
        self.copy_when_waited = True
        self.objects: dict[bytes, list[bytes | None]] = {}
        self.staged: dict[bytes, list[bytes | None]] = {}
        #: Objects dumped with EXPLICIT and neither committed nor discarded.
        self.held: set[bytes] = set()
        self.committed: list[bytes] = []
        self.discarded: list[bytes] = []
        self.tasks: list[MemoryTask] = []
        self.waits: list[float | None] = []
        self.patience: list[float] = []
        self.touched: list[bytes] = []
        self.prefetched: list[bytes] = []
        self.lookups = 0
        self.lookup_delay_s = 0.0
        self.closed = False
        self.faults: dict[bytes, Status] = {}

    def publish(self, key: bytes) -> None:
        """The object becomes visible if it is whole and nobody holds it back."""
        staged = self.staged.get(key)
        if staged is None or key in self.held or any(part is None for part in staged):
            return
        self.objects.setdefault(key, self.staged.pop(key))
        self._answer(key, Status.OK)

    def drop(self, key: bytes, status: Status) -> None:
        self.staged.pop(key, None)
        self.held.discard(key)
        self._answer(key, status)

    def _answer(self, key: bytes, status: Status) -> None:
        for task in self.tasks:
            if task.kind == "dump":
                mine = np.array([one == key for one in task.ids])
                task.stored[mine & (task.stored == Status.PENDING)] = status

    def lookup(self, ids):  # type: ignore[no-untyped-def]
        self.lookups += 1
        time.sleep(self.lookup_delay_s)
        return np.array([bytes(row) in self.objects for row in ids], dtype=bool)

    def lookup_on_prefix(self, ids):  # type: ignore[no-untyped-def]
        found = self.lookup(ids)
        return int(len(found) if found.all() else found.argmin()) - 1

    def lookup_on_reverse(self, ids):  # type: ignore[no-untyped-def]
        hits = np.flatnonzero(self.lookup(ids))
        return int(hits[-1]) if len(hits) else -1

    def prefetch(self, ids) -> None:  # type: ignore[no-untyped-def]
        assert ids.dtype == np.uint8 and ids.flags.c_contiguous and ids.shape[1:] == (16,)
        self.prefetched += [bytes(row) for row in ids]

    def touch(self, ids) -> None:  # type: ignore[no-untyped-def]
        assert ids.dtype == np.uint8 and ids.flags.c_contiguous and ids.shape[1:] == (16,)
        self.touched += [bytes(row) for row in ids]

    def remove(self, ids) -> None:  # type: ignore[no-untyped-def]
        assert ids.dtype == np.uint8 and ids.flags.c_contiguous and ids.shape[1:] == (16,)
        for row in ids:
            self.objects.pop(bytes(row), None)

    def _submit(self, kind: str, ids, shards, addresses) -> MemoryTask:  # type: ignore[no-untyped-def]
        assert ids.dtype == np.uint8 and ids.flags.c_contiguous and ids.shape[1:] == (16,)
        assert shards.dtype == np.uint32 and addresses.dtype == np.uint64
        assert addresses.shape == (len(ids), self.geometry.runs_per_shard)
        task = MemoryTask(self, kind, ids, shards, addresses)
        self.tasks.append(task)
        if self.auto:
            task.run(self.faults)
            if kind == "dump":
                task.finish()
        return task

    def load(self, ids, shards, addresses, *, event=0) -> MemoryTask:  # type: ignore[no-untyped-def]
        return self._submit("load", ids, shards, addresses)

    def dump(self, ids, shards, addresses, *, event=0, commit=CommitMode.AUTO) -> MemoryTask:  # type: ignore[no-untyped-def]
        if commit is CommitMode.EXPLICIT:
            self.held |= {bytes(row) for row in ids} - set(self.objects)
        return self._submit("dump", ids, shards, addresses)

    def commit(self, ids) -> MemoryTask:  # type: ignore[no-untyped-def]
        keys = [bytes(row) for row in ids]
        self.committed += keys
        self.held -= set(keys)
        if self.auto:
            for key in keys:
                self.publish(key)
        none = np.zeros((len(ids), self.geometry.runs_per_shard), dtype=np.uint64)
        return MemoryTask(self, "commit", ids, np.zeros(len(ids), dtype=np.uint32), none)

    def discard(self, ids) -> None:  # type: ignore[no-untyped-def]
        for key in (bytes(row) for row in ids):
            self.discarded.append(key)
            if key not in self.objects:
                self.drop(key, Status.CANCELLED)
                for task in self.tasks:
                    if task.kind == "dump":
                        mine = np.array([one == key for one in task.ids])
                        task.results[mine & (task.results == Status.PENDING)] = Status.CANCELLED

    def stats(self) -> dict[str, int]:
        return {}

    def health(self) -> dict[str, str]:
        return {}

    def close(self, timeout_s: float = 10.0) -> None:
        self.closed = True
