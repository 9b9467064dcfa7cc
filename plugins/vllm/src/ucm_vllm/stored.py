"""Scheduler side: what the stores have of a request's prefix, as far as it is worth offering."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator import Present, plan_lookup
from ucm_core.spec import SeededCoordinate
from ucm_vllm.events import KvEvents
from ucm_vllm.keys import BadKeys, Prints
from ucm_vllm.lookup import LookupService
from ucm_vllm.placement import Place, Placement
from ucm_vllm.records import Presence, Record
from ucm_vllm.retention import StateRetention
from ucm_vllm.row_blocks import row_links, row_prints
from ucm_vllm.states import as_blocks, asked_positions
from ucm_vllm.stats import UcmStats

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: How long a lookup's answer is reused while vLLM polls a waiting request.
ANSWER_LIFE_S = 0.5

_NONE = np.zeros(0, dtype=bool)


class StoredPrefixes:
    """Asks the stores for the blocks and states of a request, and remembers the answer in its record.

    ``bad``: blocks of which a load failed. ``events``: told of what is gone. Scheduler's thread only.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        lookups: LookupService,
        store_of: Callable[[SeededCoordinate], str],
        bad: BadKeys,
        stats: UcmStats,
        events: KvEvents | None = None,
        retention: StateRetention | None = None,
    ) -> None:
        self._rows = placement.rows
        self._states = placement.states
        self._places = placement.places
        self._keys = placement.keys
        self._grain = placement.grain
        self._grid = placement.table.snapshot_grid
        self._lookups = lookups
        self._store_of = store_of
        self._bad = bad
        self._stats = stats
        self._events = events
        self._retention = retention

    def nothing(self) -> Presence:
        return {place.row.name: np.zeros(0, dtype=bool) for place in self._places}

    def offered(self, record: Record, place: Place, present: Presence) -> npt.NDArray[np.bool_]:
        """The stored blocks of a row but those of which a load failed."""
        offered = present[place.row.name]
        assert record.chain is not None
        if len(self._bad):
            links = row_links(place, record.chain)[: len(offered)]
            bad = self._bad.contains(row_prints(place, links))
            self._stats.add("suppressed_blocks", int((bad & offered).sum()))
            offered = offered & ~bad
        return offered

    def look_up(self, record: Record, request: Request, *, wait: bool = True) -> Presence | None:
        """Presence of every whole block of the request's tokens; None: not known yet. ``wait``: a moment
        for the answer."""
        chain = record.chain
        assert chain is not None
        now = time.monotonic()
        if record.lookup is None:
            tokens = request.num_tokens // self._grain * self._grain
            if now < record.answered_at + ANSWER_LIFE_S and record.answered_tokens >= tokens:
                return record.present
            self.extend(record, tokens)
            where = asked_positions(chain.tokens, self._grid)
            if self._retention is not None:  # of a long prompt the early ones are not all asked for
                where = np.union1d(where, self._retention.known(chain))
            plan = plan_lookup(
                self._keys,
                chain,
                positions={place.row.name: where for place in self._states},
                store_of=self._store_of,
            )
            record.lookup = self._lookups.ask(plan, wait=wait)
        lookup = record.lookup
        if not self._lookups.poll(lookup):
            return None
        record.lookup = None
        record.plan = lookup.plan
        record.answered_at = now
        record.answered_tokens = chain.tokens
        votes = lookup.votes if lookup.done.is_set() else None
        if votes is None:
            self._stats.add("lookup_failures", 1, lookup.error or "timeout")
            record.present = self.nothing()
        else:
            record.present = {name: _array(said) for name, said in votes.present.items()} | {
                place.row.name: as_blocks(place, votes.checkpoints[place.row.name], chain.tokens)
                for place in self._states
            }
            self._tell_missing(record)
        return record.present

    def _tell_missing(self, record: Record) -> None:
        """Blocks that were announced and are not there any more."""
        if self._events is None or record.chain is None:
            return
        for place in self._rows:
            prints = row_prints(place, row_links(place, record.chain))
            there = record.present[place.row.name]
            self._events.gone(prints[: len(there)][~there])

    def extend(self, record: Record, tokens: int) -> None:
        """Hash the request's whole blocks up to token ``tokens``; only new ones cost anything."""
        chain = record.chain
        assert chain is not None
        tokens = tokens // self._grain * self._grain
        if chain.tokens < tokens:
            fresh = record.request.all_token_ids[chain.tokens : tokens]
            chain.extend(np.array(fresh, dtype=np.int64))

    def forget(self, record: Record, prints: Prints) -> None:
        """The record's lookup was wrong about these blocks."""
        assert record.chain is not None
        left = dict(record.present)
        for place in self._places:
            there = left.get(place.row.name, _NONE)
            known = row_prints(place, row_links(place, record.chain)[: len(there)])
            left[place.row.name] = there & ~np.isin(known, prints)
        record.present = left


def _array(said: Present) -> npt.NDArray[np.bool_]:
    assert not isinstance(said, int), "our stores answer per block"
    return said
