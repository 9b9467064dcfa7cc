"""The request state machine, driven through every short sequence of events."""

from __future__ import annotations

import itertools

import pytest

from ucm_core.adapter.tracker import LIVE, Phase, RequestTracker


def test_life_of_a_request_with_load_and_save() -> None:
    t = RequestTracker()
    t.add("a")
    t.add("a")
    assert t.matched("a")
    assert t.matched("a")
    assert t.allocated("a", load=True)
    assert not t.can_load("a")
    assert t.load_finished("a")
    assert t.scheduled("a")
    assert t.save_opened("a")
    assert t.finished("a") is True
    assert t.phase("a") is Phase.SAVING
    t.save_closed("a")
    t.released("a")
    assert len(t) == 0
    assert t.anomalies == 0


def test_no_load_while_a_save_still_reads_the_blocks() -> None:
    t = RequestTracker()
    t.add("a")
    t.allocated("a", load=False)
    t.scheduled("a")
    t.save_opened("a")
    assert t.preempted("a")
    assert not t.can_load("a")
    assert t.allocated("a", load=True) is False
    t.save_closed("a")
    assert t.can_load("a")
    assert t.allocated("a", load=True)
    assert t.anomalies == 1  # the refused attempt, visible


def _advance(t: RequestTracker, phase: Phase) -> None:
    t.add("a")
    if phase is Phase.WAITING:
        return
    if phase is Phase.MATCHED:
        t.matched("a")
    elif phase is Phase.ALLOCATED:
        t.allocated("a", load=False)
    elif phase is Phase.LOADING:
        t.allocated("a", load=True)
    else:
        t.allocated("a", load=False)
        t.scheduled("a")
        if phase is Phase.PREEMPTED:
            t.preempted("a")


@pytest.mark.parametrize("phase", sorted(LIVE, key=lambda p: p.value))
def test_abort_in_every_state_then_late_news_leaves_nothing(phase: Phase) -> None:
    t = RequestTracker()
    _advance(t, phase)
    assert t.phase("a") is phase
    assert t.finished("a") is False
    assert (t.phase("a") is Phase.ABORTED) == (phase is Phase.LOADING)
    assert t.load_finished("a") is False
    t.save_closed("a")
    t.released("a")
    assert t.phase("a") is None
    assert len(t) == 0
    assert t.finished("a") is False
    assert t.anomalies == 0


def test_abort_while_saving_waits_for_the_release_once() -> None:
    t = RequestTracker()
    _advance(t, Phase.COMPUTING)
    t.save_opened("a")
    t.save_opened("a")
    assert t.finished("a") is True
    assert t.finished("a") is False  # told twice: counted, changes nothing
    assert t.anomalies == 1
    t.save_closed("a")
    t.save_closed("a")
    assert "a" in t
    t.released("a")
    assert "a" not in t


EVENTS = {
    "add": lambda t: t.add("a"),
    "matched": lambda t: t.matched("a"),
    "load": lambda t: t.allocated("a", load=True),
    "alloc": lambda t: t.allocated("a", load=False),
    "load_finished": lambda t: t.load_finished("a"),
    "scheduled": lambda t: t.scheduled("a"),
    "preempted": lambda t: t.preempted("a"),
    "save_opened": lambda t: t.save_opened("a"),
    "save_closed": lambda t: t.save_closed("a"),
    "finished": lambda t: t.finished("a"),
    "released": lambda t: t.released("a"),
}


@pytest.mark.parametrize("first", list(EVENTS))
def test_no_sequence_of_events_raises_or_mixes_directions(first: str) -> None:
    for rest in itertools.product(EVENTS, repeat=4):
        t = RequestTracker()
        t.add("a")
        for name in (first, *rest):
            EVENTS[name](t)
            phase = t.phase("a")
            # One direction at a time, in whatever order news arrives.
            assert not (phase is Phase.LOADING and t.open_saves("a"))
            assert not (t.can_load("a") and t.open_saves("a"))
        # Whatever happened, draining removes the request.
        EVENTS["finished"](t)
        while t.open_saves("a"):
            t.save_closed("a")
        t.load_finished("a")
        t.released("a")
        t.released("a")
        assert t.phase("a") is None
