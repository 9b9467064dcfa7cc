"""What every adapter must know about each request, as one small state machine.

Engine neutral: ids are opaque strings, nothing here knows tokens, blocks or stores. One tracker lives
beside the engine's scheduler and is used from its thread only (no locks).

States and the events between them::

    WAITING --matched--> MATCHED --allocated(load)--> LOADING --load_finished--> ALLOCATED
       |                    |                                                        |
       +----allocated-------+--allocated(no load)--> ALLOCATED --scheduled--> COMPUTING
    COMPUTING | ALLOCATED --preempted--> PREEMPTED --matched / allocated--> ...
    any live state --finished--> SAVING (saves still read the request's blocks) or gone
    LOADING --finished--> ABORTED (the load still writes the request's blocks) --load_finished--> gone

Two rules are enforced here and nowhere else:

* *One direction at a time*: while a save of a request still reads its blocks, ``can_load`` is false,
  so that a preempted request is never loaded and saved at once.
* *Each end is told once*: ``finished`` answers whether the engine must keep the request's blocks, and
  the record disappears with the last open transfer. Events of unknown requests are late news of
  something already gone: they are ignored. Events that do not fit the state are counted in
  ``anomalies`` (an adapter must never bring its engine down) and change nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Phase(enum.Enum):
    """Where a request is. ``SAVING`` and ``ABORTED`` are finished for the engine's client."""

    WAITING = "waiting"
    MATCHED = "matched"
    ALLOCATED = "allocated"
    LOADING = "loading"
    COMPUTING = "computing"
    PREEMPTED = "preempted"
    SAVING = "saving"
    ABORTED = "aborted"


#: Phases in which the engine may still schedule the request.
LIVE = frozenset(
    {
        Phase.WAITING,
        Phase.MATCHED,
        Phase.ALLOCATED,
        Phase.LOADING,
        Phase.COMPUTING,
        Phase.PREEMPTED,
    }
)
_MATCHABLE = frozenset({Phase.WAITING, Phase.MATCHED, Phase.PREEMPTED})
#: After a failed load an engine may ask again for the same request: ALLOCATED is allocatable too.
_ALLOCATABLE = _MATCHABLE | {Phase.ALLOCATED}


@dataclass(slots=True)
class Tracked:
    """One request: its phase and the saves that may still read its blocks."""

    phase: Phase = Phase.WAITING
    open_saves: int = 0


class RequestTracker:
    """Requests by id. See the module text for states and rules."""

    def __init__(self) -> None:
        self._requests: dict[str, Tracked] = {}
        #: Events that did not fit the state they met, since the start. Zero in a correct adapter.
        self.anomalies = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def phase(self, request_id: str) -> Phase | None:
        """The phase, or None for a request that is unknown or gone."""
        tracked = self._requests.get(request_id)
        return None if tracked is None else tracked.phase

    def open_saves(self, request_id: str) -> int:
        """Saves of the request that may still read its blocks."""
        tracked = self._requests.get(request_id)
        return 0 if tracked is None else tracked.open_saves

    def add(self, request_id: str) -> None:
        """A new request. Adding a live one again changes nothing (engines differ in when they tell)."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            self._requests[request_id] = Tracked()
        elif tracked.phase not in LIVE:
            self.anomalies += 1

    def can_load(self, request_id: str) -> bool:
        """True when a load may be offered: nothing of the request is being read or written."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return False
        return tracked.open_saves == 0 and tracked.phase in _ALLOCATABLE

    def matched(self, request_id: str) -> bool:
        """A hit was promised to the engine. Repeating it is normal: engines poll."""
        return self._move(request_id, _ALLOCATABLE, Phase.MATCHED)

    def allocated(self, request_id: str, *, load: bool) -> bool:
        """The engine gave blocks; ``load`` when bytes will be loaded into them."""
        if load and not self.can_load(request_id):
            if request_id in self._requests:
                self._anomaly()
            return False
        target = Phase.LOADING if load else Phase.ALLOCATED
        return self._move(request_id, _ALLOCATABLE, target)

    def load_finished(self, request_id: str) -> bool:
        """Every rank has ended the load, well or badly. True: the request is still alive."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return False
        if tracked.phase is Phase.ABORTED:
            del self._requests[request_id]
            return False
        return self._move(request_id, frozenset({Phase.LOADING}), Phase.ALLOCATED)

    def scheduled(self, request_id: str) -> bool:
        """The engine computes tokens of the request in this step."""
        return self._move(request_id, _ALLOCATABLE | {Phase.COMPUTING}, Phase.COMPUTING)

    def preempted(self, request_id: str) -> bool:
        """The engine took the request's blocks away; it will come back from the start."""
        return self._move(request_id, _ALLOCATABLE | {Phase.COMPUTING}, Phase.PREEMPTED)

    def save_opened(self, request_id: str) -> bool:
        """A save was issued that reads the request's blocks."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase in (Phase.LOADING, Phase.ABORTED):
            self._anomaly()
            return False
        tracked.open_saves += 1
        return True

    def save_closed(self, request_id: str) -> None:
        """A save's source is free on every rank (copied, failed or cancelled)."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.open_saves == 0:
            self._anomaly()
            return
        tracked.open_saves -= 1

    def finished(self, request_id: str) -> bool:
        """The request ended (done or aborted). True: the engine must keep its blocks until the
        worker side reports the request's saves as sent, after which call :meth:`released`.

        A request that ends while its load is open stays as ``ABORTED`` until ``load_finished``; the
        engine keeps those blocks by itself, so the answer is False.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            return False
        if tracked.phase not in LIVE:
            self._anomaly()
            return False
        if tracked.phase is Phase.LOADING:
            tracked.phase = Phase.ABORTED
            return False
        if tracked.open_saves:
            tracked.phase = Phase.SAVING
            return True
        del self._requests[request_id]
        return False

    def released(self, request_id: str) -> None:
        """Every rank has reported that the request's blocks are no longer read."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.phase is not Phase.SAVING:
            self._anomaly()
            return
        del self._requests[request_id]

    def _move(self, request_id: str, allowed: frozenset[Phase], target: Phase) -> bool:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return False
        if tracked.phase not in allowed:
            self._anomaly()
            return False
        tracked.phase = target
        return True

    def _anomaly(self) -> None:
        self.anomalies += 1
