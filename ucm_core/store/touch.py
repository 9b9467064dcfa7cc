"""Hits as heat: few ``touch`` batches, each id at most once per interval, and never a pin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ucm_core.store.contract import Ids

#: Slots of the table of recent ids (16 bytes each); an id that lost its slot is told again, no more.
_SLOTS = 1 << 14


class TouchThrottle:
    """Collects the ids of hits and forwards them to ``touch`` in batches. Thread-safe, bounded.

    An id is told at most once per ``interval_s`` (more often only when two ids share a slot of the
    table). A batch leaves when ``batch`` ids are waiting or ``interval_s`` has passed since the last
    one; :meth:`flush` sends the rest. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        touch: Callable[[Ids], None],
        *,
        interval_s: float = 30.0,
        batch: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if interval_s <= 0 or batch < 1:
            raise ValueError(f"interval_s {interval_s} and batch {batch} must be positive")
        self._touch = touch
        self._interval_s = interval_s
        self._batch = batch
        self._clock = clock
        self._lock = threading.Lock()
        self._words: npt.NDArray[np.uint64] = np.zeros(_SLOTS, np.uint64)
        self._told_s: npt.NDArray[np.float64] = np.full(_SLOTS, -np.inf)
        self._waiting: list[Ids] = []
        self._count = 0
        self._sent_s = clock()
        #: Ids that were held back because they were told a short while ago.
        self.suppressed = 0

    def hit(self, ids: Ids) -> None:
        """``uint8[N, 16]`` were used. Costs a few numpy operations, and a ``touch`` now and then."""
        batch: Ids | None = None
        with self._lock:
            now = self._clock()
            if len(ids):
                self._collect(ids, now)
            if self._count >= self._batch or (
                self._count and now - self._sent_s >= self._interval_s
            ):
                batch = self._take(now)
        if batch is not None:
            self._touch(batch)

    def flush(self) -> None:
        """Send what waits."""
        with self._lock:
            batch = self._take(self._clock()) if self._count else None
        if batch is not None:
            self._touch(batch)

    def _collect(self, ids: Ids, now: float) -> None:
        words = np.ascontiguousarray(ids[:, :8]).view("<u8")[:, 0].astype(np.uint64)
        _, first = np.unique(words, return_index=True)
        words, ids = words[first], ids[first]
        slots = (words % np.uint64(_SLOTS)).astype(np.int64)
        fresh = (self._words[slots] != words) | (now - self._told_s[slots] >= self._interval_s)
        self.suppressed += int(len(fresh) - fresh.sum())
        self._words[slots[fresh]] = words[fresh]
        self._told_s[slots[fresh]] = now
        if fresh.any():
            self._waiting.append(ids[fresh])
            self._count += int(fresh.sum())

    def _take(self, now: float) -> Ids:
        batch: Ids = np.concatenate(self._waiting)
        self._waiting, self._count, self._sent_s = [], 0, now
        return batch
