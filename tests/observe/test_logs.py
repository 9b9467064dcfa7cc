"""Rate-limited logs: few lines, nothing lost without a count."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from ucm_core.observe import RateLimitedLogger


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def logger(caplog: pytest.LogCaptureFixture) -> logging.Logger:
    caplog.set_level(logging.INFO, "ucm.test")
    return logging.getLogger("ucm.test")


def told(caplog: pytest.LogCaptureFixture) -> int:
    """Lines written plus lines told to be suppressed."""
    counts = [re.search(r"(\d+) (?:more|lines)", m) for m in caplog.messages]
    written = [m for m in caplog.messages if not m.startswith(tuple("0123456789"))]
    return len(written) + sum(int(c.group(1)) for c in counts if c)


def test_outage_of_a_backend_logs_a_few_lines_and_the_count(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    limited = RateLimitedLogger(logger, interval_s=1.0, burst=2, clock=clock)
    for i in range(10_000):
        clock.now = i / 1000
        limited.error("load failed", "block %d: %s", i, "EIO")
    limited.flush()
    assert len(caplog.messages) <= 2 * 10 + 1
    assert told(caplog) == 10_000


def test_many_kinds_are_bounded_too(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    limited = RateLimitedLogger(logger, total_burst=5, max_kinds=8, clock=clock)
    for i in range(100):
        limited.warning(f"kind {i % 16}", "something")
    limited.flush()
    written = [m for m in caplog.messages if m.startswith("something")]
    assert len(written) == 5
    assert told(caplog) == 100


def test_count_comes_with_the_next_line(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    limited = RateLimitedLogger(logger, interval_s=10, burst=1, clock=clock)
    assert limited.warning("100% bad", "first %s", "x")
    assert not limited.warning("100% bad", "second %s", "x")
    clock.now = 10.0
    assert limited.warning("100% bad", "third %s", "x")
    assert caplog.messages == ["first x", "third x (1 more '100% bad' suppressed before)"]
    limited.flush()
    assert len(caplog.messages) == 2


def test_message_without_arguments_may_hold_percent_signs(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    RateLimitedLogger(logger).warning("x", "disk is 93% full")
    assert caplog.messages == ["disk is 93% full"]


def test_disabled_level_costs_and_counts_nothing(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    limited = RateLimitedLogger(logger, burst=1)
    for _ in range(100):
        limited.log(logging.DEBUG, "miss", "a miss")
    limited.flush()
    assert caplog.messages == []


def test_threads_lose_no_count(logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLogger(logger, burst=1, clock=Clock())

    def work() -> None:
        for _ in range(500):
            limited.warning("x", "line")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    limited.flush()
    assert told(caplog) == 2000
