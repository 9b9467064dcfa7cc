"""Lookups on a thread of their own: the engine holds the lock of its block tree while it asks for a hit."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from ucm_core.coordinator import LookupPlan, Votes
from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.store.contract import BlockStore

_log = RateLimitedLogger(logging.getLogger("ucm.trtllm"))

#: Questions that may wait; one more is a miss.
QUEUE_LIMIT = 64


@dataclass(slots=True)
class Question:
    """``votes`` is set before ``done``; None then means it failed."""

    plan: LookupPlan
    done: threading.Event = field(default_factory=threading.Event)
    votes: Votes | None = None


class Asker:
    """Asks each store of a plan once, in order. The thread starts with the first question and is a daemon:
    one that hangs in a mount costs hits and nothing else."""

    def __init__(self, stores: Mapping[str, BlockStore]) -> None:
        self._stores = stores
        self._questions: queue.Queue[Question | None] = queue.Queue(QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        self._stuck: Question | None = None

    def ask(self, plan: LookupPlan, wait_s: float) -> Votes | None:
        """The answer, or None after ``wait_s`` (at once while an earlier question hangs)."""
        if self._stuck is not None:
            if not self._stuck.done.is_set():
                return None
            self._stuck = None
        question = Question(plan)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ucm-lookup", daemon=True)
            self._thread.start()
        try:
            self._questions.put_nowait(question)
        except queue.Full:
            return None
        if not question.done.wait(wait_s):
            self._stuck = question
            return None
        return question.votes

    def close(self, timeout_s: float = 2.0) -> None:
        if self._thread is None:
            return
        try:
            self._questions.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                ids = question.plan.ids
                answers = {name: self._stores[name].lookup(ids[name]) for name in ids}
                question.votes = question.plan.votes(answers)
            except Exception as error:  # the thread must survive whatever a store does
                _log.warning("lookup failed", "a lookup failed: %s", error)
            question.done.set()
