"""The store contract (L3): block ids and shards in, results per shard out.

Geometry is fixed at creation, a task never carries a size, a miss is a value. Every call is
thread-safe; batch calls cross into C++ once and release the GIL.

Array shapes used throughout: ``ids`` is ``uint8[N, 16]``, ``shards`` is ``uint32[N]``, ``addresses``
is ``uint64[N, runs_per_shard]``; all C-contiguous. A wrong dtype, shape or stride is an error, never
a silent copy. An all-zero id is an error.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint8]
Shards = npt.NDArray[np.uint32]
Addresses = npt.NDArray[np.uint64]


class Status(enum.IntEnum):
    """Result of one shard. Values equal ``ucm::Status`` (native/include/ucm/status.h)."""

    OK = 0
    PENDING = 1
    MISS = 2
    CORRUPT = 3
    IO_ERROR = 4
    TIMEOUT = 5
    REJECTED = 6
    CANCELLED = 7
    CLOSED = 8


class CommitMode(enum.IntEnum):
    """When a dumped object is published: as soon as all its shards are in, or on ``commit``."""

    AUTO = 0
    EXPLICIT = 1


class TaskState(enum.IntEnum):
    """How far a dump has come: "found", "loaded" and "saved" are different facts."""

    SUBMITTED = 0  # the source may still be read
    IN_BACKEND = 1  # source free; the stage below has accepted it
    DURABLE = 2  # the last stage has it
    FAILED = 3  # at least one shard failed; see the results


@dataclass(frozen=True, slots=True)
class RunShape:
    """``count`` pieces of ``nbytes``, ``stride`` bytes apart, in engine memory."""

    nbytes: int
    count: int = 1
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Geometry:
    """Objects of ``shard_count`` shards of ``shard_bytes``; a shard is ``runs_per_shard`` runs.

    Runs have the shape ``run``; with ``more_runs`` they take turns, ``(run, *more_runs)``, and
    ``runs_per_shard`` is a multiple of that. ``shard_bytes`` is the sum of their bytes. ``layout`` is
    the layout descriptor (``ucm_core.adapter.layout``) written beside the bytes.
    """

    shard_count: int
    shard_bytes: int
    runs_per_shard: int
    run: RunShape
    layout: str
    more_runs: tuple[RunShape, ...] = ()


class Task(Protocol):
    """A submitted load or dump. Waiting twice gives the same answer."""

    def check(self, timeout_s: float = 0.0) -> bool:
        """True when every shard has its final result (loads) or a free source (dumps).

        Blocks at most ``timeout_s`` for that (GIL released); unlike ``wait``, nothing expires by it.
        """

    def wait(self, timeout_s: float | None = None) -> npt.NDArray[np.uint8]:
        """Block (GIL released) and return ``uint8[N]`` of :class:`Status`, in submission order.

        On expiry the shards still open become ``TIMEOUT`` for good: no byte of them lands in
        engine memory, or is read from it, after this returns. ``None`` waits for the task's own
        deadline (``timeout_ms`` of the store), so every wait is bounded.
        """

    def wait_shard(self, index: int, timeout_s: float | None = None) -> Status:
        """Wait for the shard at row ``index`` of the submission alone."""

    def wait_durable(self, timeout_s: float | None = None) -> npt.NDArray[np.uint8]:
        """Dumps: as ``wait``, but until the last stage has every object, or has failed."""

    def durable_results(self) -> npt.NDArray[np.uint8]:
        """As ``wait_durable`` so far, without waiting or giving up: ``PENDING`` where still open."""

    def durable_errnos(self) -> npt.NDArray[np.int32]:
        """``int32[N]``: the errno kept beside each result of ``durable_results``."""

    def errnos(self) -> npt.NDArray[np.int32]:
        """``int32[N]``: the errno kept beside each result, 0 where there is none."""

    def state(self) -> TaskState:
        """How far the task has come, without waiting."""

    def cancel(self) -> None:
        """Open shards become ``CANCELLED``; fenced like a timeout."""


class Buffer(Protocol):
    """The store's own buffer of one object, on loan to be filled in place."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """``uint8[shard_count, shard_bytes]``, rows not adjacent. Raises ValueError once it is not on
        loan any more: arrays taken before must not be used then either."""

    def donate(self) -> Task:
        """Every byte is in place: hand the buffer over, without a copy. A task of one row, as ``commit``
        returns; ``MISS`` when the object was discarded or expired meanwhile. Only once."""

    def give_back(self) -> None:
        """Nothing will come: nothing is published. Giving back twice is fine."""


class BlockStore(Protocol):
    """One pipeline bound to one geometry."""

    @property
    def geometry(self) -> Geometry: ...

    def lookup(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """``bool[N]``: whole and committed, or not. Yes promises nothing about a later load."""

    def lookup_on_prefix(self, ids: Ids) -> int:
        """Index of the last id of the leading run of hits; -1 if the first is missing."""

    def lookup_on_reverse(self, ids: Ids) -> int:
        """From the end, the index of the first hit; -1 if there is none."""

    def prefetch(self, ids: Ids) -> None:
        """Start moving the objects up a tier. No pin, no obligation."""

    def touch(self, ids: Ids) -> None:
        """Heat pulse, forwarded down the stages."""

    def load(self, ids: Ids, shards: Shards, addresses: Addresses, *, event: int = 0) -> Task:
        """Copy shards into engine memory once ``event`` (0: none) has fired; address 0 skips that run.

        Reading from the medium does not wait for the event. It must exist until the task is done.
        """

    def dump(
        self,
        ids: Ids,
        shards: Shards,
        addresses: Addresses,
        *,
        event: int = 0,
        commit: CommitMode = CommitMode.AUTO,
    ) -> Task:
        """Copy shards out of engine memory once ``event`` (0: none) has fired; address 0 is an error."""

    def commit(self, ids: Ids) -> Task:
        """Publish objects dumped with ``EXPLICIT``; one row per id."""

    def lend(self, ids: Ids) -> Buffer | None:
        """The buffer of the object ``ids`` (``uint8[1, 16]``), for bytes that are produced in place.

        None when there is no room now, or the object is being dumped or is in host memory already:
        ``dump`` it. Never waits. What is not donated within ``timeout_ms`` is a miss.
        """

    def discard(self, ids: Ids) -> None:
        """Throw away objects dumped with ``EXPLICIT`` and not committed."""

    def remove(self, ids: Ids) -> None:
        """Remove stored objects from every tier (healing, retention). Unknown ids are fine."""

    def stats(self) -> dict[str, int]:
        """Counters of the store and its stages, flat, ``<stage>.<name>``."""

    def health(self) -> dict[str, str]:
        """Stage name -> what is wrong and what to do; empty strings when healthy."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse new work, finish or abandon (and count) what runs, join threads. Idempotent."""
