"""State hit rates of a real workload: ours reaches the bound's neighbourhood, folding does not."""

from __future__ import annotations

import pytest

from benchmarks.states import bound, folded, multi_turn, ours, rates
from benchmarks.support.trace import requests


def test_methods_on_a_small_tree() -> None:
    """A system prompt (block 1), a conversation that grows, and a branch of it."""
    rows = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6, 7], [1, 2, 8, 9], [1, 2, 4, 6, 10]]
    assert bound(rows) == [0, 2, 3, 2, 4]
    # the second row continues from the end of [1, 2] and takes it; the third from [1, 2, 4]
    assert folded(rows, searched=True) == [0, 2, 3, 0, 4]
    assert folded(rows) == [0, 0, 0, 0, 4]  # only the last one's whole prefix was one before
    assert ours(rows) == [0, 2, 3, 2, 4]


def test_ours_never_passes_the_bound_and_leaves_folding_behind() -> None:
    rows = multi_turn(list(requests(1500)))
    assert len(rows) > 100
    best, mine = bound(rows), ours(rows)
    assert all(a <= b for a, b in zip(mine, best, strict=True))
    found = rates(rows)
    assert found["ours"] >= 0.9 * found["bound"]
    assert found["ours"] >= found["hash folding"] + 20
    assert found["ours"] > found["searched"] > found["hash folding"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_trace() -> None:
    """As ``python -m benchmarks.states`` prints it: whole-prefix folding, as the name says, is 20 points
    behind; the form that searches is not, and is reported beside it."""
    rows = [row for row in multi_turn(list(requests())) if len(row) > 1]
    found = rates(rows)
    print({name: round(rate, 1) for name, rate in found.items()})
    assert found["ours"] >= found["hash folding"] + 20
    assert found["bound"] >= found["ours"] > found["searched"]
