"""A call that hangs costs its caller the timeout once, and everybody else nothing."""

from __future__ import annotations

import threading
import time

import pytest

from ucm_sglang.bounded import BoundedCalls


def test_answers_and_errors_come_back() -> None:
    calls: BoundedCalls[int] = BoundedCalls(5.0, "test")
    assert calls(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        calls(lambda: 1 // 0)
    assert calls(lambda: 8) == 8
    calls.close()


def test_a_hung_call_is_given_up_once() -> None:
    """B23."""
    calls: BoundedCalls[bool] = BoundedCalls(0.2, "test")
    release = threading.Event()
    before = threading.active_count()
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer"):
        calls(lambda: release.wait(30))
    assert 0.15 < time.monotonic() - start < 2.0
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(TimeoutError, match="has not returned"):
            calls(lambda: True)
    assert time.monotonic() - start < 0.2, "later callers wait for nothing"
    assert threading.active_count() == before + 1
    release.set()
    deadline = time.monotonic() + 5
    while True:
        try:
            assert calls(lambda: True)
            break
        except TimeoutError:
            assert time.monotonic() < deadline, "it never recovered"
            time.sleep(0.01)
    calls.close()
    assert threading.active_count() == before
