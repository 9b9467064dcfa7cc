"""Random schedules of the executor: right bytes, every id once, no wait past its bound."""

from __future__ import annotations

import gc

import pytest

from schedules import Tally, run_schedule
from stub_world import World

SHORT, LONG = 40, 1000


def campaign(world: World, first: int, count: int) -> Tally:
    tally = Tally()
    for seed in range(first, first + count):
        try:
            run_schedule(world, seed, tally)
        except BaseException as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        if seed % 50 == 0:
            gc.collect()
    return tally


def test_schedules(new_world: World, capsys: pytest.CaptureFixture[str]) -> None:
    tally = campaign(new_world, 0, SHORT)
    for what in ("hits", "preemptions", "damaged objects", "slow storages", "hangs"):
        assert tally.seen[what], f"no schedule had {what}"
    with capsys.disabled():
        print(f"\n{tally}")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_schedules(new_world: World, capsys: pytest.CaptureFixture[str]) -> None:
    tally = campaign(new_world, 10_000, LONG)
    with capsys.disabled():
        print(f"\n{tally}")
    for state in ("waiting", "loading", "context", "generation", "saving"):
        assert tally.seen[f"cancelled {state}"], f"nothing was cancelled while {state}"
