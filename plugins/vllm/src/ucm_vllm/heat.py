"""Heat: which stored blocks are in use, told to the stores in throttled batches.

A collector removes what nobody touched for longest. It sees what loads read from files, but not what
the host cache or vLLM's own prefix cache served: without these pulses the hottest prefixes would look
the coldest. Heat is a hint: it is never waited for, and what does not fit is counted and left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from ucm_core.coordinator import LookupPlan
from ucm_core.coordinator.lookup import Segment
from ucm_core.identity import Ids
from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.store.contract import BlockStore

_log = RateLimitedLogger(logging.getLogger("ucm.vllm"))

#: One prefix is told at most this often, however many requests share it.
REPEAT_S = 10.0
#: Pulses are collected this long before they are sent.
BATCH_S = 1.0
#: Ids waiting to be sent; what exceeds it is counted as dropped.
PENDING_LIMIT = 65_536
#: Prefixes remembered for REPEAT_S; the oldest is forgotten (and may be told again sooner).
RECENT_LIMIT = 4_096


class Heat:
    """Pulses of one scheduler. :meth:`hit` is the scheduler's, :meth:`send` the lookup thread's.

    The two may run at the same time. ``clock`` is for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: OrderedDict[bytes, float] = OrderedDict()
        self._waiting: list[tuple[LookupPlan, int]] = []
        self._ids = 0
        self._due = 0.0

    def hit(self, plan: LookupPlan, tokens: int, link: bytes) -> tuple[int, int]:
        """``tokens`` of the request that ``plan`` asked for are used; ``link``: its chain there.

        Returns (ids taken, ids dropped). Costs a dictionary access when the prefix was told just now.
        """
        now = self._clock()
        told = self._recent.get(link)
        if told is not None and now - told < REPEAT_S:
            return 0, 0
        count = sum(end - begin for _, begin, end in _used(plan, tokens))
        if not count:
            return 0, 0
        with self._lock:
            if self._ids + count > PENDING_LIMIT:
                return 0, count
            if not self._waiting:
                self._due = now + BATCH_S
            self._waiting.append((plan, tokens))
            self._ids += count
        self._recent[link] = now
        self._recent.move_to_end(link)
        if len(self._recent) > RECENT_LIMIT:
            self._recent.popitem(last=False)
        return count, 0

    def due_in(self) -> float | None:
        """Seconds until :meth:`send` has something to do; None: nothing waits."""
        with self._lock:
            return max(0.0, self._due - self._clock()) if self._waiting else None

    def send(self, stores: Mapping[str, BlockStore]) -> None:
        """One ``touch`` per store for everything that waits. A store that fails is reported."""
        with self._lock:
            waiting, self._waiting, self._ids = self._waiting, [], 0
        batches: dict[str, list[Ids]] = {}
        for plan, tokens in waiting:
            for segment, begin, end in _used(plan, tokens):
                batches.setdefault(segment.store, []).append(plan.ids[segment.store][begin:end])
        for name, parts in batches.items():
            try:
                stores[name].touch(np.concatenate(parts))
            except Exception as error:  # heat is a hint: nothing depends on it
                _log.warning("touch failed", "a touch of used blocks failed: %s", error)


def _used(plan: LookupPlan, tokens: int) -> list[tuple[Segment, int, int]]:
    """Per coordinate the rows of its store's ids that a hit of ``tokens`` uses: ``[begin, end)``.

    A windowed row is used only as far back as its window reaches, a snapshot at its position alone.
    """
    used = []
    for segment in plan.segments:
        row = segment.at.row
        if segment.positions is not None:
            at = int(np.searchsorted(segment.positions, tokens))
            found = at < len(segment.positions) and segment.positions[at] == tokens
            begin, end = (at, at + 1) if found else (0, 0)
        else:
            reach = 0 if row.window is None else max(0, tokens - row.window) // row.block_tokens
            begin = max(reach - segment.first, 0)
            end = min(tokens // row.block_tokens - segment.first, segment.end - segment.begin)
        if begin < end:
            used.append((segment, segment.begin + begin, segment.begin + end))
    return used
