"""Calls into a medium that may hang, answered in bounded time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


class BoundedCalls(Generic[T]):
    """Runs one call at a time on a thread of its own; a caller waits ``timeout_s`` for it.

    A call that does not return in time raises TimeoutError in its caller, and until it does return so does
    every later call, at once: nothing piles up behind a hung mount. Raises what the call raised.
    """

    def __init__(self, timeout_s: float, name: str) -> None:
        self._timeout_s = timeout_s
        self._name = name
        self._calls: queue.Queue[_Call | None] = queue.Queue(1)
        self._stuck: _Call | None = None
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()

    def __call__(self, function: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._timeout_s
        if not self._turn.acquire(timeout=self._timeout_s):
            raise TimeoutError(f"{self._name}: another call is under way for {self._timeout_s} s")
        try:
            return self._run(function, deadline)
        finally:
            self._turn.release()

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; one that hangs is left behind (a daemon)."""
        if self._thread is not None and self._stuck is None:
            self._calls.put(None)
            self._thread.join(timeout_s)
        self._thread = None

    def _run(self, function: Callable[[], T], deadline: float) -> T:
        if self._stuck is not None:
            if not self._stuck.done.is_set():
                raise TimeoutError(f"{self._name}: an earlier call has not returned yet")
            self._stuck = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        call = _Call(function)
        self._calls.put(call)
        if not call.done.wait(max(0.0, deadline - time.monotonic())):
            self._stuck = call
            raise TimeoutError(f"{self._name}: no answer within {self._timeout_s} s")
        if call.error is not None:
            raise call.error
        return cast(T, call.result)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.function()
            except Exception as error:  # handed to the caller; the thread serves on
                call.error = error
            call.done.set()
