"""`BlockStore` over the native store: checks arguments, crosses once per batch, wraps results.

No call here is O(blocks) in Python. Every call that can wait or copy releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.store.contract import (
    Addresses,
    CommitMode,
    Geometry,
    Ids,
    Shards,
    Status,
    TaskState,
)


class NativeTask:
    """A submitted load, dump or commit (see :class:`ucm_core.store.contract.Task`). Thread-safe.

    The source and destination memory named by the addresses must stay valid until the task is done:
    until ``check`` is true, or ``wait`` or ``cancel`` returned. Dropping the object does not cancel.
    """

    __slots__ = ("_native",)

    def __init__(self, native: _native.Task) -> None:
        self._native = native

    def __len__(self) -> int:
        return len(self._native)

    def check(self, timeout_s: float = 0.0) -> bool:
        return self._native.check(timeout_s)

    def wait(self, timeout_s: float | None = None) -> npt.NDArray[np.uint8]:
        out = np.empty(len(self._native), np.uint8)
        self._native.wait(timeout_s, out)
        return out

    def wait_shard(self, index: int, timeout_s: float | None = None) -> Status:
        if not 0 <= index < len(self._native):
            raise IndexError(f"row {index} of a task of {len(self._native)} rows")
        return Status(self._native.wait_shard(index, timeout_s))

    def wait_durable(self, timeout_s: float | None = None) -> npt.NDArray[np.uint8]:
        out = np.empty(len(self._native), np.uint8)
        self._native.wait_durable(timeout_s, out)
        return out

    def results(self) -> npt.NDArray[np.uint8]:
        """``uint8[N]`` of :class:`Status` so far, without waiting; ``PENDING`` where open."""
        return self._outcomes(durable=False)[0]

    def durable_results(self) -> npt.NDArray[np.uint8]:
        return self._outcomes(durable=True)[0]

    def errnos(self) -> npt.NDArray[np.int32]:
        return self._outcomes(durable=False)[1]

    def durable_errnos(self) -> npt.NDArray[np.int32]:
        """``int32[N]``: the errno beside each result of ``wait_durable``."""
        return self._outcomes(durable=True)[1]

    def state(self) -> TaskState:
        return TaskState(self._native.state())

    def cancel(self) -> None:
        self._native.cancel()

    def _outcomes(self, *, durable: bool) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        n = len(self._native)
        statuses, errnos = np.empty(n, np.uint8), np.empty(n, np.int32)
        self._native.outcomes(statuses, errnos, durable)
        return statuses, errnos


class NativeBuffer:
    """The buffer of one object, on loan (see :class:`ucm_core.store.contract.Buffer`). One thread at a
    time. Dropping it gives it back; arrays over it stay valid memory, and nobody else's, until then."""

    __slots__ = ("_native", "_open")

    def __init__(self, native: _native.LentBuffer) -> None:
        self._native = native
        self._open = True

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        if not self._open:
            raise ValueError("this buffer was donated or given back: it is not yours any more")
        return self._native.array

    def donate(self) -> NativeTask:
        if not self._open:
            raise ValueError("this buffer was donated or given back already")
        self._open = False
        return NativeTask(self._native.donate())

    def give_back(self) -> None:
        self._open = False
        self._native.give_back()


def _expect(name: str, array: Any, dtype: npt.DTypeLike, shape: tuple[int | None, ...]) -> None:
    """Raise unless ``array`` is a C-contiguous ndarray of ``dtype`` and ``shape`` (None: any)."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected a numpy array, got {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {np.dtype(dtype)}, got {array.dtype}")
    fits = len(shape) == array.ndim and all(
        want is None or want == got for want, got in zip(shape, array.shape, strict=True)
    )
    if not fits:
        want = ", ".join("N" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: expected shape ({want}), got {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: expected a C-contiguous array, got strides {array.strides}; "
            "copy it yourself if that is meant"
        )


def native_geometry(geometry: Geometry) -> _native.Geometry:
    """The native twin of ``geometry``; raises ValueError where its sizes contradict each other."""
    shapes = (geometry.run, *geometry.more_runs)
    turns, rest = divmod(geometry.runs_per_shard, len(shapes))
    total = turns * sum(run.nbytes * run.count for run in shapes)
    sizes_fit = geometry.shard_bytes == total and rest == 0
    if geometry.shard_count < 1 or geometry.shard_bytes < 1 or not sizes_fit:
        raise ValueError(
            f"geometry: {geometry.shard_count} shards of {geometry.shard_bytes} bytes, but "
            f"{geometry.runs_per_shard} runs of "
            f"{', '.join(f'{run.count} x {run.nbytes}' for run in shapes)} bytes are {total}"
        )
    return _native.Geometry(
        geometry.shard_count,
        geometry.shard_bytes,
        geometry.runs_per_shard,
        [(run.nbytes, run.count, run.stride) for run in shapes],
        geometry.layout,
    )


class NativeBlockStore:
    """One pipeline bound to one geometry (:class:`ucm_core.store.contract.BlockStore`).

    Owns its native threads and buffers from construction to :meth:`close`. Use in another process
    (after fork) raises ``ClosedError``. Build one with :func:`ucm_core.store.pipeline.open_store`.
    """

    def __init__(self, native: _native.Store, geometry: Geometry) -> None:
        self._native = native
        self._geometry = geometry

    def __enter__(self) -> NativeBlockStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def lookup(self, ids: Ids) -> npt.NDArray[np.bool_]:
        _expect("ids", ids, np.uint8, (None, 16))
        out = np.empty(len(ids), np.bool_)
        self._native.lookup(ids, out)
        return out

    def lookup_on_prefix(self, ids: Ids) -> int:
        _expect("ids", ids, np.uint8, (None, 16))
        return self._native.lookup_on_prefix(ids)

    def lookup_on_reverse(self, ids: Ids) -> int:
        _expect("ids", ids, np.uint8, (None, 16))
        return self._native.lookup_on_reverse(ids)

    def prefetch(self, ids: Ids) -> None:
        _expect("ids", ids, np.uint8, (None, 16))
        self._native.prefetch(ids)

    def touch(self, ids: Ids) -> None:
        _expect("ids", ids, np.uint8, (None, 16))
        self._native.touch(ids)

    def load(self, ids: Ids, shards: Shards, addresses: Addresses, *, event: int = 0) -> NativeTask:
        self._expect_rows(ids, shards, addresses)
        return NativeTask(self._native.load(ids, shards, addresses, event))

    def dump(
        self,
        ids: Ids,
        shards: Shards,
        addresses: Addresses,
        *,
        event: int = 0,
        commit: CommitMode = CommitMode.AUTO,
    ) -> NativeTask:
        self._expect_rows(ids, shards, addresses)
        return NativeTask(self._native.dump(ids, shards, addresses, event, CommitMode(commit)))

    def commit(self, ids: Ids) -> NativeTask:
        _expect("ids", ids, np.uint8, (None, 16))
        return NativeTask(self._native.commit(ids))

    def lend(self, ids: Ids) -> NativeBuffer | None:
        _expect("ids", ids, np.uint8, (1, 16))
        lent = self._native.lend(ids)
        return None if lent is None else NativeBuffer(lent)

    def discard(self, ids: Ids) -> None:
        _expect("ids", ids, np.uint8, (None, 16))
        self._native.discard(ids)

    def remove(self, ids: Ids) -> None:
        """Remove stored objects from every tier."""
        _expect("ids", ids, np.uint8, (None, 16))
        self._native.remove(ids)

    def stats(self) -> dict[str, int]:
        return self._native.stats()

    def health(self) -> dict[str, str]:
        return self._native.health()

    def native_handle(self) -> int:
        """Address of the ``ucm::Store``, for native code in this process; valid until ``close``."""
        return self._native.native_handle()

    def close(self, timeout_s: float = 10.0) -> None:
        self._native.close(timeout_s)

    def _expect_rows(self, ids: Ids, shards: Shards, addresses: Addresses) -> None:
        _expect("ids", ids, np.uint8, (None, 16))
        _expect("shards", shards, np.uint32, (len(ids),))
        _expect("addresses", addresses, np.uint64, (len(ids), self._geometry.runs_per_shard))
