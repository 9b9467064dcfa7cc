"""Lookups, removals and heat off the scheduler's thread: a hung mount costs hits and never the engine's step.

One daemon thread asks the stores; the scheduler waits a moment for the answer (usual: a fraction of a
millisecond) and otherwise asks vLLM to come back later. A lookup older than its deadline is given up as
a miss, and until the stuck call returns every new lookup is a miss at once. The same thread sends the
pulses of :mod:`ucm_vllm.heat`, after answers and a moment late.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ucm_core.coordinator import LookupPlan, Votes
from ucm_core.identity import Ids
from ucm_core.store.contract import BlockStore
from ucm_vllm.heat import Heat

_log = logging.getLogger("ucm.vllm")

#: How long one scheduler step may wait for an answer before it goes on without it.
INLINE_WAIT_S = 0.02
#: Lookups waiting for the thread; a full queue is answered as a miss.
QUEUE_LIMIT = 256


class _Signal(enum.Enum):
    """What else the thread's queue carries."""

    WAKE = "wake"  # look whether pulses are due
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class _Removal:
    ids: Mapping[str, Ids]


@dataclass(slots=True)
class Lookup:
    """One batched question. ``votes`` is set before ``done``; None means it failed: ``error``."""

    plan: LookupPlan
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)
    votes: Votes | None = None
    error: str = ""


class LookupService:
    """Asks each store of a plan once. ``stores``: by the names that plans use.

    Created by the scheduler side; the thread starts with the first question (never before a fork).
    """

    def __init__(self, stores: Mapping[str, BlockStore], *, timeout_s: float) -> None:
        self._stores = dict(stores)
        self._timeout_s = timeout_s
        self._questions: queue.Queue[Lookup | _Removal | _Signal] = queue.Queue(QUEUE_LIMIT)
        self._heat = Heat()
        self._thread: threading.Thread | None = None
        self._stuck: Lookup | None = None
        self._closed = False

    def ask(self, plan: LookupPlan, *, wait: bool = True) -> Lookup:
        """Submit a question; it may be answered already. Never blocks longer than INLINE_WAIT_S, and not
        at all without ``wait``."""
        lookup = Lookup(plan, time.monotonic() + self._timeout_s)
        if self._closed:
            return self._answer(lookup, None, "closed")
        if not any(len(ids) for ids in plan.ids.values()):
            nothing = {store: np.zeros(0, dtype=bool) for store in plan.ids}
            return self._answer(lookup, plan.votes(nothing))
        if self._stuck is not None:
            if not self._stuck.done.is_set():
                return self._answer(lookup, None, "stuck")
            _log.warning("store lookups answer again")
            self._stuck = None
        self._start()
        try:
            self._questions.put_nowait(lookup)
        except queue.Full:
            return self._answer(lookup, None, "queue_full")
        if wait:
            lookup.done.wait(INLINE_WAIT_S)
        return lookup

    def poll(self, lookup: Lookup) -> bool:
        """True when the lookup has an answer, or has been given up as a miss."""
        if lookup.done.is_set():
            return True
        if time.monotonic() < lookup.deadline:
            return False
        if self._stuck is None:
            self._stuck = lookup
            _log.error(
                "a lookup of %d objects did not answer within %.1f s: is the storage hung? Lookups are "
                "misses until it returns",
                sum(len(ids) for ids in lookup.plan.ids.values()),
                self._timeout_s,
            )
        return True

    def used(self, plan: LookupPlan, tokens: int, link: bytes) -> tuple[int, int]:
        """A request starts from the first ``tokens`` of what ``plan`` asked for; see :class:`Heat`."""
        asleep = self._heat.due_in() is None
        told, dropped = self._heat.hit(plan, tokens, link)
        if told and asleep:
            with contextlib.suppress(queue.Full):  # then the thread is busy and looks for itself
                self._questions.put_nowait(_Signal.WAKE)
        return told, dropped

    def remove(self, ids: Mapping[str, Ids]) -> None:
        """Take objects out of the stores, by store; not waited for. A full queue leaves them where they are,
        for the storage's own collector."""
        if not self._closed:
            self._start()
            with contextlib.suppress(queue.Full):
                self._questions.put_nowait(_Removal(ids))

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop the thread. One that hangs in the storage is left behind (a daemon) and named."""
        self._closed = True
        if self._thread is None:
            return
        try:
            self._questions.put(_Signal.STOP, timeout=timeout_s)
        except queue.Full:
            _log.warning("the lookup queue is full at shutdown")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the lookup thread is stuck in the storage; it ends with the process")

    @staticmethod
    def _answer(lookup: Lookup, votes: Votes | None, error: str = "") -> Lookup:
        lookup.votes, lookup.error = votes, error
        lookup.done.set()
        return lookup

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ucm-lookup", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._next()) is not _Signal.STOP:
            if isinstance(item, Lookup):
                self._ask(item)
            elif isinstance(item, _Removal):
                self._take_out(item)
            if self._heat.due_in() == 0.0:
                self._heat.send(self._stores)
        self._heat.send(self._stores)

    def _next(self) -> Lookup | _Removal | _Signal:
        """The next question, or WAKE when pulses are due."""
        try:
            return self._questions.get(timeout=self._heat.due_in())
        except queue.Empty:
            return _Signal.WAKE

    def _take_out(self, removal: _Removal) -> None:
        for name, ids in removal.ids.items():
            try:
                self._stores[name].remove(ids)
            except Exception as error:  # the thread must survive whatever a store does
                _log.warning("%d objects could not be removed: %s", len(ids), error)

    def _ask(self, lookup: Lookup) -> None:
        try:
            ids = lookup.plan.ids
            answers = {name: self._stores[name].lookup(ids[name]) for name in ids}
            self._answer(lookup, lookup.plan.votes(answers))
        except Exception as error:  # the thread must survive whatever a store does
            _log.warning("a lookup failed: %s", error)
            self._answer(lookup, None, type(error).__name__)
