"""Legal lengths of a prefix over several pools, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_sglang.hits import PoolVote, leading, legal_lengths

bits = st.lists(st.booleans(), min_size=0, max_size=24)


def legal(vote: PoolVote, length: int) -> bool:
    """By the definition: all pages, or the last ``trailing`` of the restored prefix."""
    first = 0 if vote.trailing is None else max(0, length - vote.trailing)
    return all(vote.present[first:length])


@given(
    kv=st.integers(0, 24),
    pools=st.lists(st.tuples(bits, st.none() | st.integers(1, 6)), max_size=3),
)
def test_agrees_with_the_definition(kv: int, pools: list[tuple[list[bool], int | None]]) -> None:
    votes = [
        PoolVote(str(i), np.array((present + [False] * kv)[:kv], dtype=bool), trailing)
        for i, (present, trailing) in enumerate(pools)
    ]
    lengths, greatest = legal_lengths(kv, votes)
    assert lengths == [n for n in range(1, kv + 1) if all(legal(v, n) for v in votes)]
    for vote in votes:
        own = [n for n in range(1, kv + 1) if legal(vote, n)]
        assert greatest.get(vote.name, 0) == max(own, default=0)


@pytest.mark.parametrize(
    ("states", "other", "expected"),
    [
        ([512], [384], []),  # B08: no common checkpoint, not the lesser of the two
        ([128, 384, 512], [256, 384], [384]),
        ([1024, 4096], [2048], []),
    ],
)
def test_two_state_pools_need_a_common_position(
    states: list[int], other: list[int], expected: list[int]
) -> None:
    pages = 64

    def vote(name: str, at: list[int]) -> PoolVote:
        present = np.zeros(pages, dtype=bool)
        present[[position // 64 - 1 for position in at]] = True
        return PoolVote(name, present, 1)

    lengths, _ = legal_lengths(pages, [vote("a", states), vote("b", other)])
    assert [n * 64 for n in lengths] == expected


def test_leading() -> None:
    assert leading(np.array([True, True, False, True])) == 2
    assert leading(np.array([], dtype=bool)) == 0
    assert leading(np.array([True])) == 1
