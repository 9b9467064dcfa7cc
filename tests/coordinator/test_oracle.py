"""``resolve_hit`` against a brute-force oracle that tries every boundary and position by definition."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.coordinator import HitPlan, resolve_hit
from ucm_core.spec import SpecTable

from .tables import chain, state, table

Present = dict[str, np.ndarray]
Checkpoints = dict[str, np.ndarray]


def chain_accepts(row: Any, there: np.ndarray, position: int, local: int) -> bool:
    """Are all tokens that the row needs to continue at ``position`` in the store or the engine?"""
    block = row.block_tokens
    oldest = 0 if row.window is None else max(position - row.window, 0)
    for b in range(oldest // block, math.ceil(position / block)):
        in_engine = (b + 1) * block <= local
        in_store = b < len(there) and bool(there[b])
        if not (in_engine or in_store):
            return False
    return True


def oracle(
    rows: SpecTable,
    tokens: int,
    present: Present,
    checkpoints: Checkpoints,
    local: int,
    alignment: int,
    reserve: int,
) -> tuple[int, int]:
    def chains_accept(position: int) -> bool:
        return all(chain_accepts(r, present[r.name], position, local) for r in rows.chains)

    grid = rows.common_grid
    whole = [b for b in range(0, tokens + 1, grid) if chains_accept(b)]
    l = max(whole)  # noqa: E741
    usable = [
        p
        for p in range(local + 1, l + 1)
        if p <= tokens - reserve
        and p % alignment == 0
        and chains_accept(p)
        and all(p in checkpoints[s.name] for s in rows.snapshots)
    ]
    return l, max(usable, default=local)


def check(
    rows: SpecTable, tokens: int, present: Present, checkpoints: Checkpoints, **options: int
) -> HitPlan:
    plan = resolve_hit(rows, tokens, present, checkpoints, **options)
    expected = oracle(rows, tokens, present, checkpoints, **options)
    assert (plan.l, plan.p_star) == expected
    local, reserve = options["local"], options["reserve"]
    assert plan.p_star >= local and plan.external >= 0
    assert plan.p_star <= max(local, tokens - reserve)
    for row in rows.chains:
        assert plan.lengths[row.name] == plan.l // row.block_tokens
        assert plan.l % row.block_tokens == 0
        start, stop = plan.load[row.name]
        loaded = present[row.name][start:stop]
        assert len(loaded) == stop - start and loaded.all()
    return plan


@st.composite
def situations(draw: st.DrawFn) -> tuple[SpecTable, int, Present, Checkpoints, dict[str, int]]:
    small = st.sampled_from([1, 2, 3, 4, 6])
    chains = draw(st.lists(st.tuples(small, st.none() | st.integers(1, 9)), max_size=3))
    grids = draw(st.lists(small, max_size=2))
    if not chains and not grids:
        chains = [(2, None)]
    rows = table(
        *(chain(f"c{i}", block, window=window) for i, (block, window) in enumerate(chains)),
        *(state(f"s{i}", grid) for i, grid in enumerate(grids)),
    )
    tokens = draw(st.integers(0, 60))
    present = {}
    for row in rows.chains:
        n = tokens // row.block_tokens + draw(st.integers(-2, 1))
        dense = st.sampled_from([True] * draw(st.integers(1, 6)) + [False])
        bits = draw(st.lists(dense, min_size=max(n, 0), max_size=max(n, 0)))
        present[row.name] = np.array(bits, np.bool_)
    checkpoints = {
        row.name: np.array(draw(st.lists(st.integers(1, 70), max_size=30)), np.int64)
        for row in rows.snapshots
    }
    options = {
        "local": draw(st.integers(0, tokens) | st.just(0)),
        "alignment": draw(small),
        "reserve": draw(st.integers(1, 5)),
    }
    return rows, tokens, present, checkpoints, options


@settings(max_examples=600, deadline=None)
@given(situations())
def test_equals_brute_force(
    situation: tuple[SpecTable, int, Present, Checkpoints, dict[str, int]],
) -> None:
    rows, tokens, present, checkpoints, options = situation
    check(rows, tokens, present, checkpoints, **options)


@settings(max_examples=200, deadline=None)
@given(situations(), st.randoms(use_true_random=False))
def test_more_in_the_store_never_shortens_a_hit(
    situation: tuple[SpecTable, int, Present, Checkpoints, dict[str, int]], rng: random.Random
) -> None:
    rows, tokens, present, checkpoints, options = situation
    before = resolve_hit(rows, tokens, present, checkpoints, **options)
    for name, there in present.items():
        present[name] = there | np.array([rng.random() < 0.3 for _ in there], np.bool_)
    after = resolve_hit(rows, tokens, present, checkpoints, **options)
    assert after.l >= before.l and after.p_star >= before.p_star


def test_b12_thousand_random_tables() -> None:
    """Group sizes {16, 64, 96, 128} and compressions {1, 4, 128}: one length for all, lists exact."""
    rng = random.Random(12)
    seen_hits = 0
    for _ in range(1000):
        rows = table(
            *(
                chain(f"g{i}", math.lcm(rng.choice([16, 64, 96, 128]), ratio), compression=ratio)
                for i, ratio in enumerate(rng.choices([1, 4, 128], k=rng.randint(1, 4)))
            ),
            grain=1,
        )
        tokens = rng.randint(0, 6000)
        leading = {r.name: rng.randint(0, tokens // r.block_tokens) for r in rows.chains}
        local = rng.choice([0, 0, rng.randint(0, tokens)])
        plan = resolve_hit(rows, tokens, leading, local=local)
        assert plan.l % rows.common_grid == 0
        for row in rows.chains:
            reach = max(leading[row.name], local // row.block_tokens) * row.block_tokens
            assert plan.l <= reach
            assert plan.lengths[row.name] * row.block_tokens == plan.l
        assert plan.external >= 0
        if local >= plan.l:
            assert plan.external == 0 and plan.p_star == local
        seen_hits += plan.external > 0
    assert seen_hits > 100


def test_b12_groups_of_many_sizes_are_all_cut_to_the_common_length() -> None:
    """B12: 1000 random tables of sizes 16 to 128 with rows compressed 1:1, 4:1 and 128:1."""
    rng = random.Random(12)
    for _ in range(1000):
        rows = table(
            *(
                chain(
                    f"c{i}",
                    block,
                    compression=rng.choice([c for c in (1, 4, 128) if block % c == 0]),
                )
                for i, block in enumerate(rng.choices([16, 64, 96, 128], k=rng.randint(1, 4)))
            ),
            grain=16,
        )
        tokens = rng.randint(0, 3000)
        local = rng.choice([0, 0, rng.randint(0, tokens)])
        present = {
            row.name: np.arange(tokens // row.block_tokens) < rng.randint(0, 200)
            for row in rows.chains
        }
        plan = check(rows, tokens, present, {}, local=local, alignment=16, reserve=1)
        assert plan.l % rows.common_grid == 0
        for row in rows.chains:
            stored = int(present[row.name].sum()) * row.block_tokens
            assert plan.l <= max(stored, local)
        # The engine has more than the stores: nothing from outside, and never a negative number.
        more = check(rows, tokens, present, {}, local=tokens, alignment=16, reserve=1)
        assert more.external == 0
