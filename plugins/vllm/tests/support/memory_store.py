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
        self.durable = False

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
        """Dumps: what was copied becomes visible."""
        for key in dict.fromkeys(self.ids):
            staged = self.store.staged.pop(key, None)
            if staged is not None and all(part is not None for part in staged):
                self.store.objects.setdefault(key, staged)
        self.durable = True

    # the contract
    def check(self, timeout_s: float = 0.0) -> bool:
        if timeout_s:
            self.store.patience.append(timeout_s)
        return bool((self.results != Status.PENDING).all())

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        self.store.waits.append(timeout_s)
        if timeout_s and not self.check() and self.store.copy_when_waited:
            self.run()
        self.results[self.results == Status.PENDING] = Status.TIMEOUT
        return self.results

    def wait_shard(self, index: int, timeout_s: float | None = None) -> Status:
        return Status(int(self.wait(timeout_s)[index]))

    def wait_durable(self, timeout_s: float | None = None) -> np.ndarray:
        return self.wait(timeout_s)

    def durable_errnos(self) -> np.ndarray:
        return np.zeros(len(self.ids), dtype=np.int32)

    def durable_results(self) -> np.ndarray:
        pending = (self.results == Status.OK) & (not self.durable)
        return np.where(pending, Status.PENDING, self.results).astype(np.uint8)

    def errnos(self) -> np.ndarray:
        return np.zeros(len(self.results), dtype=np.int32)

    def state(self) -> TaskState:
        if not self.check():
            return TaskState.SUBMITTED
        if (self.results != Status.OK).any():
            return TaskState.FAILED
        return TaskState.DURABLE if self.durable else TaskState.IN_BACKEND

    def cancel(self) -> None:
        self.results[self.results == Status.PENDING] = Status.CANCELLED


def _gather(geometry: Geometry, row: np.ndarray) -> bytes:
    run, parts = geometry.run, []
    for address in row:
        assert address, "a dump must not have address 0"
        parts += [
            ctypes.string_at(int(address) + i * run.stride, run.nbytes) for i in range(run.count)
        ]
    return b"".join(parts)


def _scatter(geometry: Geometry, data: bytes, row: np.ndarray) -> None:
    run, at = geometry.run, 0
    for address in row:
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
        self.tasks: list[MemoryTask] = []
        self.waits: list[float | None] = []
        self.patience: list[float] = []
        self.touched: list[bytes] = []
        self.lookups = 0
        self.lookup_delay_s = 0.0
        self.closed = False
        self.faults: dict[bytes, Status] = {}

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

    def prefetch(self, ids) -> None: ...  # type: ignore[no-untyped-def]

    def touch(self, ids) -> None:  # type: ignore[no-untyped-def]
        assert ids.dtype == np.uint8 and ids.flags.c_contiguous and ids.shape[1:] == (16,)
        self.touched += [bytes(row) for row in ids]

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

    def load(self, ids, shards, addresses) -> MemoryTask:  # type: ignore[no-untyped-def]
        return self._submit("load", ids, shards, addresses)

    def dump(self, ids, shards, addresses, *, event=0, commit=CommitMode.AUTO) -> MemoryTask:  # type: ignore[no-untyped-def]
        return self._submit("dump", ids, shards, addresses)

    def commit(self, ids):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def discard(self, ids) -> None: ...  # type: ignore[no-untyped-def]

    def stats(self) -> dict[str, int]:
        return {}

    def health(self) -> dict[str, str]:
        return {}

    def close(self, timeout_s: float = 10.0) -> None:
        self.closed = True
