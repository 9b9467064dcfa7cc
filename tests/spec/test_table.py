"""The spec table: grouping, refusals that say what to do, coordinates."""

from __future__ import annotations

from typing import Any

import pytest

from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.identity import ModelIdentity
from ucm_core.spec import (
    Coordinate,
    GroupSpec,
    KeySpace,
    Kind,
    LayerSpec,
    RankRule,
    SpecTable,
    Unit,
    describe,
    head_slices,
    layers_from_lists,
    rank_heads,
    units,
)

MODEL = ModelIdentity("id:w", "bf16")


def row(name: str = "kv", layers: tuple[int, ...] = (0,), **fields: Any) -> GroupSpec:
    defaults = {"kind": "chain", "block_tokens": 64, "entry_bytes": 8}
    return GroupSpec(name=name, layers=layers, **{**defaults, **fields})


def sidecar(**fields: Any) -> GroupSpec:
    return row("idx", **{"kind": "sidecar", "unit": "follower", "follows": "kv", **fields})


REFUSED = {
    "layer in no row": ([row()], "layers 1 of 'target' are in no row"),
    "layer in two rows": ([row(layers=(0, 1)), row("b", (1,))], "layer 1 .* rows kv, b"),
    "layer twice": ([row(layers=(0, 1, 1))], "names a layer twice"),
    "no such layer": ([row(layers=(0, 1, 2))], "layers 2 .* do not exist"),
    "no layers": ([row(layers=(0, 1)), row("b", ())], "has no layers"),
    "same name": ([row(), row(layers=(1,))], "2 rows are named 'kv'"),
    "follower of nothing": ([row(layers=(0, 1)), sidecar(follows="nix")], "follows 'nix'"),
    "follower of none": (
        [row(kind="none", layers=(0, 1), entry_bytes=0), sidecar()],
        "no data of its own",
    ),
    "sidecar with other blocks": (
        [row(layers=(0, 1)), sidecar(block_tokens=128)],
        "uses its source's blocks",
    ),
    "chain that follows": ([row(layers=(0, 1), follows="kv")], "follows nothing"),
    "sidecar without follower unit": (
        [row(layers=(0, 1)), sidecar(unit="layer")],
        "unit 'follower'",
    ),
    "compression does not divide": (
        [row(layers=(0, 1), compression=128)],
        "no multiple of its compression 128:1",
    ),
    "block is no multiple of the grain": (
        [row(layers=(0, 1), block_tokens=96)],
        "no multiple of the namespace's block_tokens 64",
    ),
    "window unit without window": ([row(layers=(0, 1), unit="window")], "needs a window"),
    "window of a snapshot": ([row(layers=(0, 1), kind="snapshot", window=8)], "window 8"),
    "stored without bytes": ([row(layers=(0, 1), entry_bytes=0)], "needs the bytes"),
    "none with bytes": ([row(layers=(0, 1), kind="none")], "stores nothing"),
    "unknown part": ([row(layers=(0, 1)), row("d", part="draft")], "part 'draft'"),
}


@pytest.mark.parametrize(("rows", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_contradictions_are_refused(rows: list[GroupSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpecTable(rows, grain=64, num_layers=2)


def test_a_layer_may_keep_two_different_things() -> None:
    """KV and a state, or KV of two roles (a window beside compressed entries); never the same twice."""
    rows = [
        row("swa", (0, 1), window=64, unit="window"),
        row("compressed", (1,), compression=4, role="compressed"),
        row("s", (0,), kind="snapshot"),
    ]
    table = SpecTable(rows, grain=64, num_layers=2)
    seeds = {at.seed for r in table.rows for at in KeySpace(table, MODEL).of(r.name)}
    assert len(seeds) == 3
    again = row("again", (1,), compression=8, role="compressed")
    with pytest.raises(ConfigError, match="layer 1 .* rows compressed, again"):
        SpecTable([*rows, again], grain=64, num_layers=2)


def test_every_problem_is_listed() -> None:
    with pytest.raises(ConfigError) as e:
        SpecTable([row(entry_bytes=0), row("b", (5,), block_tokens=3)], grain=64, num_layers=2)
    assert len(e.value.problems) == 4


def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown kind 'ring'; known are chain, snapshot"):
        row(kind="ring")
    with pytest.raises(ConfigError, match="layer 'x': unknown rankrule"):
        LayerSpec(0, "x", Kind.CHAIN, rank_rule="both")  # type: ignore[arg-type]


def test_a_chain_block_that_does_not_divide_a_grid_is_warned_about() -> None:
    rows = [row(block_tokens=128), row("s", (1,), kind="snapshot", block_tokens=64)]
    (warning,) = SpecTable(rows, grain=64, num_layers=2).warnings
    assert "'kv' (128 tokens)" in warning and "'s' (64)" in warning
    fine = [row(), row("s", (1,), kind="snapshot", block_tokens=128)]
    assert not SpecTable(fine, grain=64, num_layers=2).warnings


def test_per_layer_lists_must_have_one_entry_a_layer() -> None:
    with pytest.raises(ConfigError, match="'kind' has 4 entries for 3 layers") as e:
        layers_from_lists(3, kind=["chain"] * 4, window=[None, 8], entry_bytes=8)
    assert len(e.value.problems) == 2
    with pytest.raises(ConfigError, match="wndow"):
        layers_from_lists(3, kind="chain", wndow=8)


def test_store_groups_ignore_the_engines_groups() -> None:
    """gemma-like: the engine splits its sliding layers into two allocator groups; we have one row."""
    layers = layers_from_lists(
        6,
        kind="chain",
        entry_bytes=[1024, 1024, 2048, 1024, 1024, 2048],
        heads=[8, 8, 2, 8, 8, 2],
        head_size=[256, 256, 512, 256, 256, 512],
        window=[1024, 1024, None, 1024, 1024, None],
        dtype="bf16",
    )
    table = SpecTable.from_layers(layers, grain=64)
    assert {r.name: r.layers for r in table.rows} == {
        "chain.h8x256.bf16.w1024": (0, 1, 3, 4),
        "chain.h2x512.bf16": (2, 5),
    }
    assert [r.unit for r in table.rows] == [Unit.WINDOW, Unit.LAYER]


def test_compressed_rows_get_a_block_they_divide() -> None:
    """A 128:1 row and a sidecar of 16:1 beside a plain row."""
    layers = [
        LayerSpec(0, "full", Kind.CHAIN, 8),
        LayerSpec(1, "heavy", Kind.CHAIN, 8, compression=128),
        LayerSpec(2, "light", Kind.CHAIN, 8, compression=4),
        LayerSpec(2, "light.index", Kind.SIDECAR, 2, compression=96, follows="light"),
    ]
    table = SpecTable.from_layers(layers, grain=64)
    assert [r.block_tokens for r in table.chains] == [64, 128, 192]
    (index,) = (r for r in table.rows if r.kind is Kind.SIDECAR)
    assert index.block_tokens == 192 and index.entries_per_block == 2
    assert table.common_grid == 384


def test_followers_and_layers_without_cache() -> None:
    layers = [
        LayerSpec(0, "a", Kind.CHAIN, 8),
        LayerSpec(1, "b", Kind.FOLLOWER, follows="a"),
        LayerSpec(2, "c", Kind.NONE),
        LayerSpec(3, "d", Kind.FOLLOWER, follows="a"),
        LayerSpec(0, "draft.0", Kind.CHAIN, 8, part="draft"),
    ]
    table = SpecTable.from_layers(layers, grain=64)
    follower = next(r for r in table.rows if r.kind is Kind.FOLLOWER)
    assert follower.layers == (1, 3) and table[follower.follows or ""].layers == (0,)
    assert table.num_layers == {"target": 4, "draft": 1}
    seeds = {at.seed for r in table.chains for at in KeySpace(table, MODEL).of(r.name)}
    assert len(seeds) == 2  # layer 0 of the draft is not layer 0 of the target


@pytest.mark.parametrize("follows", ["nobody", "b"])
def test_following_nothing_is_refused(follows: str) -> None:
    layers = [
        LayerSpec(0, "a", Kind.CHAIN, 8),
        LayerSpec(1, "b", Kind.FOLLOWER, follows="a"),
        LayerSpec(2, "c", Kind.FOLLOWER, follows=follows),
    ]
    with pytest.raises(ConfigError, match=f"'c' follows '{follows}'"):
        SpecTable.from_layers(layers, grain=64)


def test_head_slices() -> None:
    split = row(heads=8)
    assert head_slices(split, 4) == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert head_slices(split, 1) == ((0, 8),)
    assert len(head_slices(split, 16)) == 8  # more ranks than heads: copies of a head
    assert head_slices(row(heads=8, rank_rule="union"), 4) == ((0, 8),)
    with pytest.raises(UnsupportedError, match="cannot be cut into 3"):
        head_slices(split, 3)


def test_heads_of_a_rank() -> None:
    split = row(heads=8)
    assert [rank_heads(split, r, 4) for r in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [rank_heads(row(heads=2), r, 4) for r in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert rank_heads(row(heads=8, rank_rule="union"), 3, 4) == (0, 8)
    for tp in (3, 12):
        with pytest.raises(UnsupportedError, match="evenly"):
            rank_heads(split, 0, tp)


def test_b05_tp_and_pp_sizes_are_not_in_the_ids() -> None:
    """Any TP with the namespace's slices, and any PP cut at the same layers, names the same objects."""
    table = SpecTable([row(layers=(0, 1, 2, 3), heads=8)], grain=64, num_layers=4)
    two = KeySpace(table, MODEL, slices=2).of("kv")
    assert len({at.seed for at in two}) == 2
    assert [at.coordinate.heads for at in two] == [(0, 4), (4, 8)]
    uneven = {"target": [range(1), range(1, 4)]}
    lists = {"target": [[0], [3, 1, 2]]}
    assert KeySpace(table, MODEL, stages=uneven).of("kv") == KeySpace(
        table, MODEL, stages=lists
    ).of("kv")


@pytest.mark.parametrize("stages", [[range(3)], [range(2), range(1, 4)], [], [range(5)]])
def test_stages_must_hold_each_layer_once(stages: list[range]) -> None:
    table = SpecTable([row(layers=(0, 1, 2, 3))], grain=64, num_layers=4)
    with pytest.raises(ConfigError, match="pipeline stages"):
        KeySpace(table, MODEL, stages={"target": stages})


def test_a_stage_without_layers_of_a_row_has_no_object() -> None:
    table = SpecTable([row(layers=(0, 1)), row("b", (2, 3))], grain=64, num_layers=4)
    keys = KeySpace(table, MODEL, stages={"target": [range(2), range(2, 4)]})
    assert [at.coordinate.layers for at in keys.of("kv")] == [(0, 1)]


def test_tensors_across_groups_are_refused() -> None:
    at = Coordinate((0, 1, 2), (0, 1))
    spec = row(layers=(0, 1, 2))
    assert [u.layers for u in units(spec, at, [(1, 0)])] == [(0, 1), (2,)]
    assert [u.layers for u in units(spec, at, [(7, 8)])] == [(0,), (1,), (2,)]
    for tensors in ([(2, 3)], [(0, 1), (1, 2)]):
        with pytest.raises(ConfigError, match="does not fit"):
            units(spec, at, tensors)
    assert at.shard_of(1) == 1


def test_default_rank_rule_is_the_safe_one() -> None:
    assert row().rank_rule is RankRule.INTERSECTION


def test_description_for_people() -> None:
    rows = [
        row("kv", (0, 1, 2, 5), entry_bytes=3, compression=2),
        row("s", (3,), kind="snapshot", block_tokens=32, entry_bytes=4096),
        sidecar(layers=(4,)),
        row("no", (6,), kind="none", entry_bytes=0),
    ]
    lines = describe(SpecTable(rows, grain=64, num_layers=7))
    assert [line.split()[0] for line in lines] == ["name", "kv", "s", "idx", "no", "warning:"]
    assert "4 (0-2,5)" in lines[1] and " 1.5 " in lines[1]
    assert "4096 a state" in lines[2]
    assert "sidecar of kv" in lines[3]
    assert lines[4].split()[2] == "-"
