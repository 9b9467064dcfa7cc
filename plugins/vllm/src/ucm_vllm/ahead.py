"""Scheduler side: what a waiting request will load moves up a tier before the request is scheduled.

vLLM asks for hits only when it could admit a request. One that waits behind others for a place or for
blocks would begin its slow reads after all that waiting; here its hit is looked up meanwhile and the
workers are told to prefetch. A hint only: nothing is pinned, promised or counted as a hit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from ucm_core.coordinator import HitPlan
from ucm_vllm.messages import Outbox, RowBlocks
from ucm_vllm.placement import RowPlace
from ucm_vllm.records import Record
from ucm_vllm.row_blocks import row_links

#: Waiting requests remembered. Of more than that the oldest are forgotten: vLLM admits them first, and
#: asks for them itself.
WAITING_LIMIT = 256
#: Requests looked at in one step, so that a burst of arrivals does not hold up the step.
LOOKS_PER_STEP = 2
#: Blocks of a row asked for; a prefetch costs the workers a lookup of each.
BLOCKS_LIMIT = 1024


class Ahead:
    """Scheduler's thread only. ``plan_of``: the hit of a request without what vLLM has itself, None while
    the stores have not answered; it must not wait. ``is_waiting``: not admitted yet, and still there."""

    def __init__(
        self,
        rows: tuple[RowPlace, ...],
        *,
        outbox: Outbox,
        plan_of: Callable[[Record], HitPlan | None],
        is_waiting: Callable[[Record], bool],
    ) -> None:
        self._rows = rows
        self._outbox = outbox
        self._plan_of = plan_of
        self._is_waiting = is_waiting
        self._records: deque[Record] = deque(maxlen=WAITING_LIMIT)

    def __len__(self) -> int:
        return len(self._records)

    def arrived(self, record: Record) -> None:
        """A new request that may have a hit."""
        self._records.append(record)

    def step(self) -> None:
        """At the end of a step: who is still here was not admitted by it."""
        looks = 0
        while self._records and looks < LOOKS_PER_STEP:
            record = self._records[0]
            if self._is_waiting(record):
                looks += 1
                plan = self._plan_of(record)
                if plan is None:
                    return  # the answer is there in one of the next steps
                self._tell(record, plan)
            self._records.popleft()

    def _tell(self, record: Record, plan: HitPlan) -> None:
        if not plan.external:
            return
        assert record.chain is not None
        for place in self._rows:
            first, end = plan.load[place.row.name]
            blocks = np.arange(first, min(end, first + BLOCKS_LIMIT), dtype=np.int64)
            if len(blocks):
                links = row_links(place, record.chain)[blocks]
                self._outbox.meta.prefetches.append(
                    RowBlocks(place.index, links, blocks, np.zeros((len(blocks), 0, 0), np.int32))
                )
