"""``SnapshotStore``: whole, immutable states by id, over the same stages as :class:`BlockStore`.

Where a block store moves bricks of a prefix, this one moves *sealed cans*: a snapshot is all shards
of one id, or nothing. What follows from that, and is all this layer adds:

* a ``get`` copies the whole snapshot into the caller's private memory (copy on use). The stored bytes
  are never handed out for writing, so any number of requests may continue from one snapshot, at once;
* a snapshot whose one shard failed has failed: results are per snapshot, never per shard, and there is
  no way to load a part of one or to skip an address;
* a ``put`` of an id that is stored already succeeds without a copy: equal ids are equal bytes.

Like every L3 object it knows ids and shards alone. Which (group, position, prefix) an id stands for is
:class:`ucm_core.spec.SnapshotKey`.

Shapes: ``ids`` is ``uint8[N, 16]``, ``addresses`` is ``uint64[N, shard_count, runs_per_shard]`` (for
``put`` of some shards: ``uint64[N, len(shards), runs_per_shard]``), both C-contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ucm_core.store.contract import BlockStore, Buffer, CommitMode, Geometry, Ids, Status, Task

SnapshotAddresses = npt.NDArray[np.uint64]


class SnapshotTask:
    """A submitted get or put of ``count`` snapshots. Thread-safe; waiting twice gives the same answer.

    After a get that is not ``OK`` the destination holds undefined bytes: throw it away and compute.
    """

    __slots__ = ("_count", "_task")

    def __init__(self, task: Task, count: int) -> None:
        self._task = task
        self._count = count

    def __len__(self) -> int:
        return self._count

    def check(self, timeout_s: float = 0.0) -> bool:
        """Gets: every snapshot has its result. Puts: the source is free."""
        return self._task.check(timeout_s)

    def wait(self, timeout_s: float | None = None) -> npt.NDArray[np.uint8]:
        """``uint8[N]`` of :class:`Status`, one per snapshot; fenced as :meth:`Task.wait` is."""
        return self._whole(self._task.wait(timeout_s))

    def wait_durable(self, timeout_s: float | None = None) -> npt.NDArray[np.uint8]:
        """Puts: as :meth:`wait`, until the last stage has every snapshot or has failed. Only then may a
        directory be told about it."""
        return self._whole(self._task.wait_durable(timeout_s))

    def durable_results(self) -> npt.NDArray[np.uint8]:
        """As :meth:`wait_durable` so far, without waiting: ``PENDING`` where still open."""
        return self._whole(self._task.durable_results())

    def cancel(self) -> None:
        """Open snapshots become ``CANCELLED``; fenced like a timeout."""
        self._task.cancel()

    def _whole(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The result of each snapshot: a failure of any shard, else ``PENDING`` of any, else ``OK``."""
        by_snapshot = rows.reshape(self._count, -1) if self._count else rows.reshape(0, 1)
        failed = np.where(by_snapshot == Status.PENDING, Status.OK, by_snapshot).max(axis=1)
        open_ = np.where((by_snapshot == Status.PENDING).any(axis=1), Status.PENDING, Status.OK)
        return np.where(failed != Status.OK, failed, open_).astype(np.uint8)


class SnapshotStore:
    """Snapshots of one geometry. Thread-safe; owns the block store that it is given.

    Every call costs one crossing into C++ for the whole batch, whatever the number of snapshots.
    """

    def __init__(self, blocks: BlockStore) -> None:
        self._blocks = blocks
        self._shards = np.arange(blocks.geometry.shard_count, dtype=np.uint32)

    def __enter__(self) -> SnapshotStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def geometry(self) -> Geometry:
        return self._blocks.geometry

    def lookup(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """``bool[N]``: whole and committed, or not; asks the stages, there is no index that could lie."""
        return self._blocks.lookup(ids)

    def prefetch(self, ids: Ids) -> None:
        """Start moving the snapshots up a tier. No pin, no obligation."""
        self._blocks.prefetch(ids)

    def touch(self, ids: Ids) -> None:
        """Heat pulse. Use :class:`ucm_core.store.touch.TouchThrottle` for hits."""
        self._blocks.touch(ids)

    def get(self, ids: Ids, addresses: SnapshotAddresses) -> SnapshotTask:
        """Copy whole snapshots into the caller's memory, which is its own from then on.

        The same id may be asked for several times, each with its own destination. Raises ValueError
        for an address of 0: a snapshot is never loaded in part.
        """
        rows = self._rows(ids, addresses, self._shards)
        if rows.size and not rows.all():
            raise ValueError(
                "get: an address is 0; a state is usable whole or not at all, give every shard a place"
            )
        shards = np.tile(self._shards, len(ids))
        return SnapshotTask(self._blocks.load(self._repeat(ids), shards, rows), len(ids))

    def put(
        self,
        ids: Ids,
        addresses: SnapshotAddresses,
        *,
        shards: Sequence[int] | None = None,
        event: int = 0,
        commit: CommitMode = CommitMode.AUTO,
    ) -> SnapshotTask:
        """Copy states out of the caller's memory once ``event`` (0: none) has fired.

        ``shards``: only these, where layers finish one after the other; a snapshot exists when all of
        its shards were put, in whatever order and by however many calls, and not before. The source
        must stay as it is until ``check`` is true or ``wait`` has returned.
        """
        some = self._shards if shards is None else np.array(shards, np.uint32)
        rows = self._rows(ids, addresses, some)
        numbers = np.tile(some, len(ids))
        task = self._blocks.dump(
            self._repeat(ids, len(some)), numbers, rows, event=event, commit=commit
        )
        return SnapshotTask(task, len(ids))

    def lend(self, ids: Ids) -> Buffer | None:
        """The store's own buffer for the snapshot ``ids`` (``uint8[1, 16]``), to compute or transfer a
        state into; hand it over with :meth:`donate`, without a copy. None: ``put`` it instead (no room
        now, or the snapshot is being put or is in host memory already)."""
        return self._blocks.lend(ids)

    def donate(self, buffer: Buffer) -> SnapshotTask:
        """Publish a lent buffer whose bytes are all in place; it is not the caller's any more."""
        return SnapshotTask(buffer.donate(), 1)

    def commit(self, ids: Ids) -> SnapshotTask:
        """Publish snapshots put with ``EXPLICIT``."""
        return SnapshotTask(self._blocks.commit(ids), len(ids))

    def discard(self, ids: Ids) -> None:
        """Throw away what was put with ``EXPLICIT`` and not committed."""
        self._blocks.discard(ids)

    def remove(self, ids: Ids) -> None:
        """Remove snapshots from every tier: what a retention budget gave up."""
        self._blocks.remove(ids)

    def stats(self) -> dict[str, int]:
        return self._blocks.stats()

    def health(self) -> dict[str, str]:
        return self._blocks.health()

    def close(self, timeout_s: float = 10.0) -> None:
        self._blocks.close(timeout_s)

    def _repeat(self, ids: Ids, times: int | None = None) -> Ids:
        return np.repeat(ids, len(self._shards) if times is None else times, axis=0)

    def _rows(
        self, ids: Ids, addresses: SnapshotAddresses, shards: npt.NDArray[np.uint32]
    ) -> SnapshotAddresses:
        runs = self.geometry.runs_per_shard
        want = (len(ids), len(shards), runs)
        if not isinstance(addresses, np.ndarray) or addresses.dtype != np.uint64:
            kind = getattr(addresses, "dtype", type(addresses).__name__)
            raise TypeError(f"addresses: expected a numpy array of uint64, got {kind}")
        if addresses.shape != want or not addresses.flags.c_contiguous:
            raise ValueError(
                f"addresses: expected C-contiguous {want} (snapshots, shards, runs), got "
                f"{addresses.shape} with strides {addresses.strides}"
            )
        return addresses.reshape(len(ids) * len(shards), runs)
