"""The worked examples of the specification (2.4) and of the field's failure cases, as written there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ucm_core.coordinator import Reason, combine, resolve_hit
from ucm_core.spec import Kind, Unit

from .tables import INTERSECTION, UNION, chain, state, table


def at(*positions: int) -> np.ndarray:
    return np.array(positions, np.int64)


HYBRID = table(
    chain("mla", 128),
    chain("csa_c16", 128, compression=16),
    chain("swa", 128, window=1024),
    state("mamba2", 64),
    {
        "name": "dsa",
        "kind": Kind.SIDECAR,
        "follows": "mla",
        "block_tokens": 128,
        "unit": "follower",
    },
    {"name": "cross", "kind": Kind.NONE, "entry_bytes": 0},
    grain=128,
)


def hybrid(tokens: int, mla: int, csa: int, swa: int, *checkpoints: int) -> tuple[int, int]:
    present = {"mla": mla // 128, "csa_c16": csa // 128, "swa": swa // 128}
    plan = resolve_hit(HYBRID, tokens, present, {"mamba2": at(*checkpoints)})
    return plan.l, plan.p_star


def test_min_of_groups_then_checkpoint() -> None:
    assert hybrid(3000, 2560, 2432, 3000, 2304) == (2432, 2304)


def test_a_chain_deeper_than_the_checkpoint() -> None:
    assert hybrid(5000, 4608, 4480, 5000, 4096, 4608) == (4480, 4096)


def test_a_evicted_chain_leaves_no_checkpoint_in_reach() -> None:
    assert hybrid(5000, 4608, 3072, 5000, 4096, 4608) == (3072, 0)


def test_sidecars_and_none_have_no_say() -> None:
    """They are not even asked for, and a sidecar is loaded where its source is."""
    plan = resolve_hit(HYBRID, 1000, {"mla": 7, "csa_c16": 7, "swa": 7}, {"mamba2": at(640)})
    assert plan.p_star == 640
    assert plan.load["dsa"] == plan.load["mla"] == (0, 5)
    assert set(plan.lengths) == {"mla", "csa_c16", "swa"}
    assert "cross" not in plan.load


def test_two_chain_groups_meet_on_the_common_grid() -> None:
    groups = table(chain("a", 128), chain("b", 64))
    plan = resolve_hit(groups, 5000, {"a": 4608 // 128, "b": 4416 // 64})
    assert (plan.l, plan.p_star) == (4352, 4352)


@pytest.mark.parametrize(
    ("depth", "states", "expected"),
    [
        (512, [(384, 640)], 384),
        (256, [(640,)], 0),
        (512, [()], 0),
        (512, [(128, 384, 512), (256, 384)], 384),
        (4096, [(1024, 4096), (2048,)], 0),
        (600, [(512,), (384,)], 0),  # not the min of the two deepest
    ],
)
def test_b08_every_state_group_at_one_position(
    depth: int, states: list[tuple[int, ...]], expected: int
) -> None:
    rows = table(chain("kv", 8), *(state(f"s{i}", 8) for i in range(len(states))))
    checkpoints = {f"s{i}": at(*positions) for i, positions in enumerate(states)}
    plan = resolve_hit(rows, 5000, {"kv": depth // 8}, checkpoints)
    assert (plan.l, plan.p_star) == (depth, expected)
    assert plan.reason is Reason.CHECKPOINT


def test_b08_a_group_that_was_not_asked_has_no_checkpoint() -> None:
    rows = table(chain("kv", 8), state("a", 8), state("b", 8))
    assert resolve_hit(rows, 100, {"kv": 12}, {"a": at(64)}).p_star == 0


@pytest.mark.parametrize(("block", "grid", "expected"), [(64, 64, 1984), (128, 64, 1920)])
def test_unique_tails(block: int, grid: int, expected: int) -> None:
    """2000 shared tokens; the first request left checkpoints at every grid position of its own."""
    rows = table(chain("kv", block), state("s", grid))
    positions = np.arange(grid, 2000, grid, dtype=np.int64)
    assert resolve_hit(rows, 2100, {"kv": 2000 // block}, {"s": positions}).p_star == expected


def test_b_rank_rules_by_enumeration() -> None:
    """4 ranks, each fails a dump with p = 0.1: all of them 65.61 %, any of them 99.99 %."""
    row = {rule: table(chain("kv", 8, rank_rule=rule)).rows[0] for rule in (UNION, INTERSECTION)}
    usable = dict.fromkeys(row, 0.0)
    for outcome in itertools.product([True, False], repeat=4):
        weight = float(np.prod([0.9 if ok else 0.1 for ok in outcome]))
        ranks = np.array(outcome)[:, None]  # bool[ranks, blocks]
        for rule in row:
            usable[rule] += weight * combine(row[rule], [ranks])[0]
    assert usable[INTERSECTION] == pytest.approx(0.6561)
    assert usable[UNION] == pytest.approx(0.9999)


@pytest.mark.parametrize(("alignment", "full"), [(1, 63), (16, 48)])
@pytest.mark.parametrize("local", [0, 16, 48, 64])
def test_b11_a_full_hit_leaves_a_token(alignment: int, full: int, local: int) -> None:
    """N = 64, blocks of 16, all four stored; whatever the engine has, one token is computed."""
    plan = resolve_hit(table(chain("kv", 16)), 64, {"kv": 4}, local=local, alignment=alignment)
    assert plan.l == 64
    assert plan.external == max(full - local, 0)
    assert plan.p_star >= local


@pytest.mark.parametrize("local", [0, 16, 48, 64])
def test_b11_one_more_token(local: int) -> None:
    plan = resolve_hit(table(chain("kv", 16)), 65, {"kv": 4}, local=local, alignment=16)
    assert plan.p_star == 64 and plan.external == 64 - local


def test_b11_speculation_reserves_more() -> None:
    drafts = 3
    plan = resolve_hit(table(chain("kv", 16)), 64, {"kv": 4}, reserve=drafts + 2)
    assert (plan.p_star, plan.reason) == (59, Reason.RESERVE)


def test_empty_prompt_and_empty_store() -> None:
    one = table(chain("kv", 16))
    assert resolve_hit(one, 0, {"kv": 0}).external == 0
    assert resolve_hit(one, 100, {"kv": np.zeros(6, np.bool_)}).p_star == 0
    assert resolve_hit(one, 100, {"kv": np.zeros(6, np.bool_)}).reason is Reason.CHAIN


def test_local_hit_bridges_what_the_store_lost() -> None:
    """The store lost block 0, the engine has it: what follows is usable."""
    there = np.array([False, False, True, True, False, True])
    one = table(chain("kv", 16))
    assert resolve_hit(one, 100, {"kv": there}).p_star == 0
    plan = resolve_hit(one, 100, {"kv": there}, local=40)
    assert (plan.l, plan.p_star, plan.load["kv"]) == (64, 64, (2, 4))


def test_window_needs_only_what_it_reaches() -> None:
    """Blocks before the window are gone; the hit stands where the window's blocks are whole."""
    rows = table(chain("kv", 16), chain("swa", 16, window=32))
    gone = np.array([False] * 4 + [True] * 2 + [False] * 2)  # only [64, 96) is kept
    plan = resolve_hit(rows, 200, {"kv": 8, "swa": gone})
    assert (plan.l, plan.p_star) == (96, 96)
    assert plan.load == {"kv": (0, 6), "swa": (4, 6)}
    assert (plan.reason, plan.row) == (Reason.WINDOW, "swa")


def test_two_windows_need_a_fixed_point() -> None:
    """Each window alone accepts 96 or 80; both accept only 48."""
    rows = table(chain("kv", 16), chain("a", 16, window=16), chain("b", 16, window=32))
    a = np.array([True, True, True, False, True, False])  # boundaries 16, 32, 48, 80
    b = np.array([True, True, True, False, True, True])  # boundaries 16, 32, 48, 96
    assert resolve_hit(rows, 100, {"kv": 6, "a": a, "b": b}).l == 48


def test_window_must_hold_at_p_star_not_only_at_l() -> None:
    """The window's blocks before l are there, those before the checkpoint are not."""
    rows = table(chain("kv", 16), chain("swa", 16, window=16), state("s", 16))
    there = np.array([True, False, False, True])
    plan = resolve_hit(rows, 100, {"kv": 4, "swa": there}, {"s": at(16, 48)})
    assert (plan.l, plan.p_star) == (64, 16)


def test_window_needs_the_block_that_p_star_lies_in() -> None:
    """A checkpoint off the block grid: the started block is part of its window."""
    rows = table(chain("kv", 16), chain("swa", 16, window=16), state("s", 1))
    there = np.array([False, True])
    plan = resolve_hit(rows, 100, {"kv": 2, "swa": there}, {"s": at(3)})
    assert (plan.l, plan.p_star) == (32, 0)


def test_alignment_applies_to_checkpoints() -> None:
    rows = table(chain("kv", 16), state("s", 1))
    plan = resolve_hit(rows, 100, {"kv": 6}, {"s": at(17, 32, 90)}, alignment=16)
    assert plan.p_star == 32


def test_states_alone() -> None:
    plan = resolve_hit(table(state("s", 16)), 100, {}, {"s": at(16, 96, 100)})
    assert (plan.p_star, plan.load) == (96, {})


@pytest.mark.parametrize(
    "bad", [{"local": 101}, {"local": -1}, {"alignment": 0}, {"reserve": 0}], ids=str
)
def test_impossible_arguments(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        resolve_hit(table(chain("kv", 16)), 100, {"kv": 1}, **bad)


def test_answers_must_be_bool_and_complete() -> None:
    one = table(chain("kv", 16))
    with pytest.raises(TypeError, match="uint8"):
        resolve_hit(one, 100, {"kv": np.ones(6, np.uint8)})  # type: ignore[dict-item]
    with pytest.raises(KeyError):
        resolve_hit(one, 100, {})


def test_units_of_the_example_rows() -> None:
    assert HYBRID["swa"].unit is Unit.WINDOW
