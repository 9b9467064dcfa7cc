"""Lookups off the scheduler's thread, so that a hung mount costs hits and never the engine's step.

One daemon thread asks the stores; the scheduler waits a moment for the answer (usual: a fraction of a
millisecond) and otherwise asks vLLM to come back later. A lookup older than its deadline is given up as
a miss, and until the stuck call returns every new lookup is a miss at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucm_core.store.contract import BlockStore
from ucm_vllm.identity import object_ids

_log = logging.getLogger("ucm.vllm")

#: How long one scheduler step may wait for an answer before it goes on without it.
INLINE_WAIT_S = 0.02
#: Lookups waiting for the thread; a full queue is answered as a miss.
QUEUE_LIMIT = 256

Present = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LookupLane:
    """One coordinate: the seed of its ids and the store that holds its objects."""

    store: BlockStore
    seed: bytes


@dataclass(slots=True)
class Lookup:
    """One batched question. ``present`` is set before ``done``; None means it failed: ``error``."""

    links: npt.NDArray[np.uint8]
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)
    present: Present | None = None
    error: str = ""


class LookupService:
    """Asks every coordinate of every link; a block is present when all coordinates are.

    Created by the scheduler side; the thread starts with the first question (never before a fork).
    """

    def __init__(self, lanes: Sequence[LookupLane], *, timeout_s: float) -> None:
        self._by_store: dict[int, tuple[BlockStore, list[bytes]]] = {}
        for lane in lanes:
            self._by_store.setdefault(id(lane.store), (lane.store, []))[1].append(lane.seed)
        self._timeout_s = timeout_s
        self._questions: queue.Queue[Lookup | None] = queue.Queue(QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        self._stuck: Lookup | None = None
        self._closed = False

    def ask(self, links: npt.NDArray[np.uint8]) -> Lookup:
        """Submit a question; it may be answered already. Never blocks longer than INLINE_WAIT_S."""
        lookup = Lookup(links, time.monotonic() + self._timeout_s)
        if self._closed or not len(links):
            return self._answer(lookup, np.zeros(len(links), dtype=bool))
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
                "a lookup of %d blocks did not answer within %.1f s: is the storage hung? Lookups are "
                "misses until it returns",
                len(lookup.links),
                self._timeout_s,
            )
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop the thread. One that hangs in the storage is left behind (a daemon) and named."""
        self._closed = True
        if self._thread is None:
            return
        try:
            self._questions.put(None, timeout=timeout_s)
        except queue.Full:
            _log.warning("the lookup queue is full at shutdown")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the lookup thread is stuck in the storage; it ends with the process")

    @staticmethod
    def _answer(lookup: Lookup, present: Present | None, error: str = "") -> Lookup:
        lookup.present, lookup.error = present, error
        lookup.done.set()
        return lookup

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ucm-lookup", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (lookup := self._questions.get()) is not None:
            try:
                self._answer(lookup, self._look_up(lookup.links))
            except Exception as error:  # the thread must survive whatever a store does
                _log.warning("lookup of %d blocks failed: %s", len(lookup.links), error)
                self._answer(lookup, None, type(error).__name__)

    def _look_up(self, links: npt.NDArray[np.uint8]) -> Present:
        present = np.ones(len(links), dtype=bool)
        for store, seeds in self._by_store.values():
            ids = np.concatenate([object_ids(seed, links) for seed in seeds])
            found = np.asarray(store.lookup(ids), dtype=bool)
            present &= found.reshape(len(seeds), len(links)).all(axis=0)
        return present
