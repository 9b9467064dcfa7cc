"""Logs of things that may happen thousands of times a second: few lines, and a count of the rest."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Kind:
    opened_s: float
    written: int = 0
    suppressed: int = 0


class RateLimitedLogger:
    """Writes at most ``burst`` lines per kind and ``total_burst`` lines in all per interval.

    What is held back is counted, and told with the kind's next line or by :meth:`flush`, so nothing
    disappears without a trace. ``kind`` is a short fixed name of the event ("load failed"), never a
    block id: kinds are bounded by ``max_kinds``, and the one longest unused is flushed to make room.
    Thread-safe; the arguments of a suppressed line are not formatted. ``clock`` is monotonic seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = 10.0,
        burst: int = 3,
        total_burst: int = 20,
        max_kinds: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._burst = burst
        self._total_burst = total_burst
        self._max_kinds = max_kinds
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()
        self._window_s = clock()
        self._window_lines = 0

    def log(self, level: int, kind: str, message: str, *args: object) -> bool:
        """Log, or count as suppressed; True when the line was written."""
        if not self._logger.isEnabledFor(level):
            return False
        evicted: tuple[str, int] | None = None
        with self._lock:
            now = self._clock()
            state = self._kinds.get(kind)
            if state is None:
                evicted = self._make_room()
                state = self._kinds[kind] = _Kind(now)
            self._kinds.move_to_end(kind)
            if now - state.opened_s >= self._interval_s:
                state.opened_s, state.written = now, 0
            if now - self._window_s >= self._interval_s:
                self._window_s, self._window_lines = now, 0
            write = state.written < self._burst and self._window_lines < self._total_burst
            suppressed = 0
            if write:
                state.written += 1
                self._window_lines += 1
                suppressed, state.suppressed = state.suppressed, 0
            else:
                state.suppressed += 1
        if evicted is not None:
            self._tell(*evicted)
        if write:
            tail = f" ({suppressed} more '{kind}' suppressed before)" if suppressed else ""
            if args:
                self._logger.log(level, message + "%s", *args, tail)
            else:
                self._logger.log(level, "%s%s", message, tail)
        return write

    def warning(self, kind: str, message: str, *args: object) -> bool:
        """:meth:`log` at WARNING."""
        return self.log(logging.WARNING, kind, message, *args)

    def error(self, kind: str, message: str, *args: object) -> bool:
        """:meth:`log` at ERROR."""
        return self.log(logging.ERROR, kind, message, *args)

    def flush(self) -> None:
        """Tell every count that is still held back; at shutdown, or now and then."""
        with self._lock:
            pending = [(kind, state.suppressed) for kind, state in self._kinds.items()]
            for state in self._kinds.values():
                state.suppressed = 0
        for kind, suppressed in pending:
            self._tell(kind, suppressed)

    def _make_room(self) -> tuple[str, int] | None:
        if len(self._kinds) < self._max_kinds:
            return None
        kind, state = self._kinds.popitem(last=False)
        return kind, state.suppressed

    def _tell(self, kind: str, suppressed: int) -> None:
        if suppressed:
            self._logger.warning("%d lines '%s' were suppressed", suppressed, kind)
