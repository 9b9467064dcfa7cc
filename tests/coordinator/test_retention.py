"""Where checkpoints are made, and which stay: the rules of the specification (2.5), example C by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ucm_core.coordinator import (
    CheckpointBudget,
    Computation,
    DefaultRetention,
    PrefixSketch,
    budgeted_checkpoints,
)
from ucm_core.identity import ContentChain
from ucm_core.plugins import PluginHost
from ucm_core.spec import Retention, SpecTable

from .tables import chain, state, table

POLICY = DefaultRetention()


def rows(
    grid: int = 64, block: int = 64, grain: int = 64, **retention: int | bool | None
) -> SpecTable:
    kept = Retention(**retention)  # type: ignore[arg-type]
    return table(chain("kv", block), state("s", grid, retention=kept), grain=grain)


def positions(of: SpecTable, computed_from: int, tokens: int, shared: int = 0) -> list[int]:
    return POLICY.positions(of, Computation(computed_from, tokens, shared)).tolist()


def test_c_interval_and_end() -> None:
    """10000 tokens, interval 1024: {1024, ..., 9216} and the end on the grid (156 x 64); the same
    request again: none new; a request that shares its first 5000 and continues at 4096: its end."""
    spec = rows(interval=1024)
    assert positions(spec, 0, 10_000) == [*range(1024, 9217, 1024), 9984]
    assert positions(spec, 9984, 10_000) == []
    assert positions(spec, 4096, 5000) == [4992]


def test_each_trigger_alone() -> None:
    assert positions(rows(at_end=False), 0, 5000) == []
    assert positions(rows(), 0, 5000) == [4992]
    assert positions(rows(interval=1024, at_end=False), 0, 3000) == [1024, 2048]
    assert positions(rows(at_end=False), 0, 5000, shared=2000) == [1984]
    assert positions(rows(at_end=False), 1984, 5000, shared=2000) == []  # served there
    assert positions(table(chain("kv", 64), grain=64), 0, 5000, shared=2000) == []


def test_an_interval_off_the_grid_keeps_the_position_before() -> None:
    """Multiples of 96 are 96, 192, 288, 384; on a grid of 64: 64, 192, 256, 384."""
    assert positions(rows(interval=96, at_end=False), 0, 400) == [64, 192, 256, 384]


def test_all_rows_keep_the_same_positions_where_chain_blocks_end() -> None:
    """Grids 64 and 96 with chain blocks of 128: only multiples of 384 serve all three."""
    spec = table(
        chain("kv", 128),
        state("a", 64, retention=Retention(interval=512)),
        state("b", 96, retention=Retention(interval=None, at_end=False)),
        grain=64,
    )
    assert (spec.snapshot_grid, spec.checkpoint_grid) == (192, 384)
    # floors of 512, 1024, 1536, 2048 are 384, 768, 1536, 1920; the end is 1920 too
    assert positions(spec, 0, 2200) == [384, 768, 1536, 1920]


def test_random_tables_against_the_definition() -> None:
    rng = random.Random(5)
    for _ in range(500):
        kept = Retention(rng.choice([None, 7, 32, 100]), at_end=rng.random() < 0.7)
        block, grid, grain = rng.choice([4, 8]), rng.choice([1, 4, 6]), rng.choice([2, 4])
        spec = table(chain("kv", block), state("s", grid, retention=kept), grain=grain)
        tokens = rng.randint(0, 300)
        start, shared = rng.randint(0, tokens), rng.randint(0, tokens)
        usable = [p for p in range(1, tokens + 1) if p % grid == p % grain == p % block == 0]
        wanted = set()
        if kept.interval:
            for boundary in range(kept.interval, tokens + 1, kept.interval):
                wanted.add(max((p for p in usable if p <= boundary), default=0))
        if kept.at_end:
            wanted.add(max(usable, default=0))
        wanted.add(max((p for p in usable if p <= shared), default=0))
        expected = sorted(p for p in wanted if p > start)
        assert positions(spec, start, tokens, shared) == expected


# -- (b): prefixes seen before ---------------------------------------------------------------------


def links(*tokens: range) -> np.ndarray:
    made = ContentChain(16)
    made.extend(np.concatenate([np.array(t, np.uint32) for t in tokens]))
    return made.links


def test_the_deepest_boundary_shared_with_any_earlier_request() -> None:
    sketch = PrefixSketch(bits=12)
    assert sketch.shared(links(range(160))) == 0
    sketch.add(links(range(160)))
    sketch.add(links(range(64), range(500, 600)))
    assert sketch.shared(links(range(160))) == 10
    assert sketch.shared(links(range(100), range(900, 950))) == 6  # 96 tokens
    assert sketch.shared(links(range(64), range(500, 540))) == 6  # 64 + 32 of the other one
    assert sketch.shared(links(range(1, 161))) == 0
    assert sketch.shared(links(range(5))) == 0


def test_the_sketch_is_bounded_and_forgets() -> None:
    sketch = PrefixSketch(bits=4)
    sketch.add(links(range(1600)))
    assert sum(sketch.shared(links(range(16 * n))) > 0 for n in range(1, 100)) <= 100
    for salt in range(20):
        sketch.add(links(range(salt * 10_000, salt * 10_000 + 160)))
    assert sketch.shared(links(range(32))) == 0
    for bad in (0, 29):
        with pytest.raises(ValueError, match="bits"):
            PrefixSketch(bad)


# -- budgets ---------------------------------------------------------------------------------------


def place(n: int) -> tuple[int, bytes]:
    return 64 * n, bytes([n]) * 32


def test_often_used_outlives_new_and_old_favourites_fade() -> None:
    budget = CheckpointBudget(3)
    assert [budget.add(place(n)) for n in (1, 2, 3)] == [None] * 3
    for _ in range(20):
        budget.use(place(1))
    assert budget.add(place(4)) == place(2)  # of the unused, the oldest
    assert budget.add(place(5)) == place(3)
    assert place(1) in budget and len(budget) == 3
    for n in range(6, 60):  # nobody asks for 1 any more
        budget.add(place(n))
        budget.use(place(n))
    assert place(1) not in budget
    assert budget.evicted == 2 + 54


def test_values_are_frequency_times_recency() -> None:
    """Against the formula, written out over a plain dict."""
    rng = random.Random(9)
    budget = CheckpointBudget(5)
    model: dict[tuple[int, bytes], tuple[int, int]] = {}
    tick = 0
    for _ in range(2000):
        what = place(rng.choice([1, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8, 9]))
        action = rng.random()
        if action < 0.1:
            budget.forget(what)
            model.pop(what, None)
            continue
        tick += 1
        if action < 0.5:
            budget.use(what)
            if what in model:
                model[what] = (model[what][0] + 1, tick)
            continue
        expected = None
        if what in model:
            model[what] = (model[what][0], tick)
        else:
            if len(model) == 5:
                value = {k: uses / (1 + tick - last) for k, (uses, last) in model.items()}
                expected = min(value.values())
            victim = budget.add(what)
            assert (victim is None) == (expected is None)
            if victim is not None:
                uses, last = model.pop(victim)
                assert uses / (1 + tick - last) == expected
            model[what] = (1, tick)
            continue
        assert budget.add(what) is None
    assert {k for k in model if k in budget} == set(model) and len(budget) == len(model)


def test_the_tightest_row_decides() -> None:
    """States of 8 and of 24 bytes a layer; 100 bytes hold 12 of one and 4 of the other."""
    kept = Retention(budget_bytes=100)
    both = table(
        state("a", 64, retention=kept), state("b", 64, entry_bytes=24, retention=kept), grain=64
    )
    assert budgeted_checkpoints(both) == 4
    assert budgeted_checkpoints(table(state("a", 64), grain=64)) is None
    tiny = table(state("a", 64, retention=Retention(budget_bytes=1)), grain=64)
    assert budgeted_checkpoints(tiny) == 1
    with pytest.raises(ValueError, match="limit"):
        CheckpointBudget(0)


def test_the_default_rule_comes_through_the_hook() -> None:
    spec = PluginHost(env={}).retention("default")
    policy = spec.build()
    assert policy.positions(rows(interval=1024), Computation(0, 1100)).tolist() == [1024, 1088]
