"""Blocks of one coordinate on their way between an engine and a store, in one task or one a layer.

Engine neutral: who submits decides what a task covers; what came of each *block* is asked here. All
calls are vectorised: no Python per block.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucm_core.errors import UcmError
from ucm_core.store.contract import Addresses, BlockStore, CommitMode, Ids, Status, Task, TaskState

Statuses = npt.NDArray[np.uint8]
#: Block numbers, ``int64[n]``.
Blocks = npt.NDArray[np.int64]
#: Marks the end of what the engine has queued so far: (event for ``load`` or ``dump``, what must live
#: until then).
Mark = Callable[[], tuple[int, object]]
#: The mark of an engine whose bytes are there when its call returns.
NOTHING_QUEUED: tuple[int, object] = (0, None)


@dataclass(slots=True)
class BlockTransfer:
    """``ids[N]``: the blocks; ``addresses[N, shards, runs]``: where each of their shards is in the engine.

    ``parts`` are filled by :meth:`load` and :meth:`dump`: each a task over some shards, and the blocks it
    covers. ``refused``: errors with which the store refused a submission; its blocks count as REJECTED.
    ``kept``: what events need alive until :meth:`is_over`. Used by one thread. The engine's memory must
    stay valid until :meth:`is_over`.
    """

    store: BlockStore
    ids: Ids
    addresses: Addresses
    parts: list[tuple[Task, Blocks]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def shards(self) -> int:
        """Shards of one block."""
        return int(self.addresses.shape[1])

    def load(self, shards: range, after: tuple[int, object] = NOTHING_QUEUED) -> Task | None:
        """Start loading these shards of every block. The engine's memory is written once ``after`` has
        fired: what the engine queued before may still use it."""
        event, keep = after
        if event:
            self.kept.append(keep)

        def load(ids: Ids, numbers: npt.NDArray[np.uint32], addresses: Addresses) -> Task:
            return self.store.load(ids, numbers, addresses, event=event)

        return self._submit(shards, np.arange(len(self)), load)

    def dump(
        self,
        shards: range,
        commit: CommitMode = CommitMode.AUTO,
        after: tuple[int, object] = NOTHING_QUEUED,
    ) -> Task | None:
        """Start dumping these shards of every block that has lost none yet: a block without room is
        without room for all of its shards. Their bytes must be final, or be so once ``after`` has fired.
        """
        event, keep = after
        if event:
            self.kept.append(keep)

        def dump(ids: Ids, numbers: npt.NDArray[np.uint32], addresses: Addresses) -> Task:
            return self.store.dump(ids, numbers, addresses, event=event, commit=commit)

        blocks = np.arange(len(self))
        if self.parts or self.refused:
            so_far = self._combined(lambda task: task.durable_results())
            blocks = blocks[(so_far == Status.OK) | (so_far == Status.PENDING)]
        return self._submit(shards, blocks, dump)

    def _submit(
        self,
        shards: range,
        blocks: Blocks,
        submit: Callable[[Ids, npt.NDArray[np.uint32], Addresses], Task],
    ) -> Task | None:
        count = len(shards)
        if not len(blocks) or not count:
            return None
        ids = np.repeat(self.ids[blocks], count, axis=0)
        numbers = np.tile(np.arange(shards.start, shards.stop, dtype=np.uint32), len(blocks))
        rows = self.addresses[blocks, shards.start : shards.stop].reshape(len(ids), -1)
        try:
            task = submit(ids, numbers, np.ascontiguousarray(rows))
        except (UcmError, ValueError) as error:
            self.refused.append(str(error))
            return None
        self.parts.append((task, blocks))
        return task

    # -- what became of it -----------------------------------------------------------------------------

    def is_over(self, timeout_s: float = 0.0) -> bool:
        """Every row submitted so far has its result (loads) or a free source (dumps). Waits at most
        ``timeout_s`` for that; nothing expires by it."""
        if not timeout_s:
            return all(task.check() for task, _ in self.parts)
        until = time.monotonic() + timeout_s
        return all(task.check(max(0.0, until - time.monotonic())) for task, _ in self.parts)

    def is_answered(self) -> bool:
        """The last stage has answered for every row submitted so far. Says nothing of the outcome."""
        return all(_answered(task) for task, _ in self.parts)

    def wait(self, timeout_s: float) -> None:
        """Until it is over; what is not by then is fenced: no byte moves any more."""
        until = time.monotonic() + timeout_s
        for task, _ in self.parts:
            task.wait(max(0.0, until - time.monotonic()))

    def fence(self) -> None:
        """What is not over is cancelled: no byte moves any more."""
        for task, _ in self.parts:
            task.cancel()

    def statuses(self, *, durable: bool = False) -> Statuses:
        """``uint8[N]``: per block OK, or the status of a shard that is not.

        ``durable``: what the last stage said. Call when it is over (answered): a row still open
        becomes TIMEOUT, for good where it is a load.
        """
        if durable:
            found = self._combined(lambda task: task.durable_results())
        else:
            found = self._combined(lambda task: task.wait(0.0))
        found[found == Status.PENDING] = Status.TIMEOUT
        return found

    def _combined(self, results: Callable[[Task], Statuses]) -> Statuses:
        """Per block its first failure; else PENDING when a shard is open; else OK."""
        worst = np.full(len(self), Status.REJECTED if self.refused else Status.OK, np.uint8)
        for task, blocks in self.parts:
            table = results(task).reshape(len(blocks), -1)
            failed = (table != Status.OK) & (table != Status.PENDING)
            bad, first = failed.any(axis=1), failed.argmax(axis=1)
            said = np.where(bad, table[np.arange(len(table)), first], table.max(axis=1))
            before = worst[blocks]
            keep = (before != Status.OK) & ((before != Status.PENDING) | ~bad)
            worst[blocks] = np.where(keep, before, said)
        return worst


def _answered(task: Task) -> bool:
    state = task.state()
    if state is TaskState.DURABLE:
        return True
    # One row's failure says nothing of the others yet.
    return state is TaskState.FAILED and not bool((task.durable_results() == Status.PENDING).any())


def reasons(transfers: Iterable[BlockTransfer], *, durable: bool) -> str:
    """What the stores said of rows that failed: ``": io_error ENOSPC (No space left on device)"``."""
    said: set[tuple[int, int]] = set()
    refused: set[str] = set()
    for transfer in transfers:
        refused.update(transfer.refused)
        for task, _ in transfer.parts:
            statuses = task.durable_results() if durable else task.wait(0.0)
            numbers = task.durable_errnos() if durable else task.errnos()
            failed = (statuses != Status.OK) & (statuses != Status.PENDING)
            pairs = [statuses[failed].astype(np.int64), numbers[failed].astype(np.int64)]
            found = np.unique(np.stack(pairs, 1), axis=0)
            said.update((int(status), int(number)) for status, number in found)
    words = [
        Status(status).name.lower()
        + (f" {errno.errorcode.get(number, number)} ({os.strerror(number)})" if number else "")
        for status, number in sorted(said)
    ]
    words += [f"refused: {text}" for text in sorted(refused)]
    return ": " + ", ".join(words) if words else ""
