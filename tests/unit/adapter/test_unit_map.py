"""Layer calls -> units: rows, followers, parts, uneven stages, layers that are never called for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.spec import TARGET, GroupSpec, SpecTable, object_shape


def row(name: str, layers: range | tuple[int, ...], **fields: Any) -> GroupSpec:
    defaults = {"kind": "chain", "block_tokens": 64, "entry_bytes": 8}
    return GroupSpec(name=name, layers=tuple(layers), **{**defaults, **fields})


def state(name: str, layers: range | tuple[int, ...], **fields: Any) -> GroupSpec:
    return row(name, layers, kind="snapshot", **fields)


def t(*layers: int) -> list[LayerKey]:
    return [LayerKey(TARGET, i) for i in layers]


def steps(text: str) -> list[str]:
    return text.split()


def trace(units: UnitMap, calls: list[LayerKey]) -> list[str]:
    """What happens, in order: ``+row.shard`` complete, ``i`` runs, ``-row.shard`` saved."""
    out = [f"+{u.group}.{u.shard}" for u in units.at_start]
    for key in units.order:
        if key in calls:
            out += [f"+{u.group}.{u.shard}" for u in units.before(key)]
        out.append(str(key.index) if key.part == TARGET else f"{key.part}{key.index}")
        if key in calls:
            out += [f"-{u.group}.{u.shard}" for u in units.after(key)]
    return out + [f"-{u.group}.{u.shard}" for u in units.at_end]


def test_one_unit_a_layer() -> None:
    table = SpecTable([row("kv", range(3))], grain=64, num_layers=3)
    units = UnitMap(table, {TARGET: range(3)})
    assert trace(units, t(0, 1, 2)) == steps("+kv.0 0 -kv.0 +kv.1 1 -kv.1 +kv.2 2 -kv.2")


def test_a_row_is_loaded_before_its_first_and_saved_after_its_last() -> None:
    """Layers 0 and 2 share a tensor; the one of 1 and 3 is private to each."""
    table = SpecTable([state("s", range(4))], grain=64, num_layers=4)
    units = UnitMap(table, {TARGET: range(4)}, tensors=[t(2, 0)])
    # shards are single layers (2 and 1 have 1 in common), so the row is shards 0 and 1
    assert [(u.layers, u.shard, u.shards) for u in units.units] == [
        ((0, 2), 0, 2),
        ((1,), 2, 1),
        ((3,), 3, 1),
    ]
    assert trace(units, t(0, 1, 2, 3)) == steps("+s.0 0 +s.2 1 -s.2 2 -s.0 +s.3 3 -s.3")


def test_rows_of_equal_size_are_one_shard_each() -> None:
    table = SpecTable([state("s", range(6))], grain=64, num_layers=6)
    units = UnitMap(table, {TARGET: range(6)}, tensors=[t(0, 2, 4), t(1, 3, 5)])
    assert [(u.shard, u.shards) for u in units.units] == [(0, 1), (1, 1)]
    shape = object_shape(units.units)
    assert (shape.shard_count, shape.layers_per_shard) == (2, 3)
    assert shape.shard_bytes(table["s"]) == 3 * table["s"].shard_bytes
    # another packing of the same layers is another layout of the same object
    other = UnitMap(table, {TARGET: range(6)}, tensors=[t(0, 1, 2), t(3, 4, 5)])
    plain = UnitMap(table, {TARGET: range(6)})
    packings = {object_shape(each.units).packing for each in (units, other, plain)}
    assert len(packings) == 3 and object_shape(plain.units).packing == ""


def test_calls_for_the_last_attention_layer_alone() -> None:
    """Mamba 0-2, attention 3: the engine calls for 3 only, after the states were used."""
    table = SpecTable([state("s", range(3)), row("kv", (3,))], grain=64, num_layers=4)
    units = UnitMap(table, {TARGET: range(4)}, called=t(3), tensors=[t(0, 1, 2)])
    assert trace(units, t(3)) == steps("+s.0 0 1 2 +kv.0 3 -s.0 -kv.0")


def test_states_between_called_layers_wait_at_the_call_before() -> None:
    table = SpecTable([row("kv", (0, 3)), state("s", (1, 2, 4))], grain=64, num_layers=5)
    units = UnitMap(table, {TARGET: range(5)}, called=t(0, 3))
    assert trace(units, t(0, 3)) == (
        steps("+kv.0 +s.0 +s.1 0 -kv.0 1 2 +kv.1 +s.2 3 -kv.1 -s.0 -s.1 4 -s.2")
    )


def test_rows_that_stand_apart_wait_for_no_call() -> None:
    """A state beside attention in one layer: the call for the layer is for its attention alone."""
    table = SpecTable([row("kv", range(2)), state("s", range(2))], grain=64, num_layers=2)
    units = UnitMap(table, {TARGET: range(2)}, apart=["s"])
    assert trace(units, t(0, 1)) == (steps("+s.0 +s.1 +kv.0 0 -kv.0 +kv.1 1 -kv.1 -s.0 -s.1"))
    with pytest.raises(ConfigError, match="not in the table"):
        UnitMap(table, {TARGET: range(2)}, apart=["t"])


def test_no_calls_at_all_is_start_and_end() -> None:
    table = SpecTable([state("s", range(2))], grain=64, num_layers=2)
    units = UnitMap(table, {TARGET: range(2)}, called=())
    assert trace(units, []) == steps("+s.0 +s.1 0 1 -s.0 -s.1")


def test_a_source_is_complete_before_its_first_follower() -> None:
    """Layers 2 and 3 reuse the KV of layer 1; run out of order, a follower may come first."""
    rows = [row("own", (0,)), row("shared", (1,), dtype="x")]
    rows.append(
        row(
            "again",
            (2, 3),
            kind="follower",
            unit="follower",
            follows="shared",
            entry_bytes=0,
            block_tokens=0,
        )
    )
    table = SpecTable(rows, grain=64, num_layers=4)
    units = UnitMap(table, {TARGET: range(4)})
    assert trace(units, t(0, 1, 2, 3)) == (steps("+own.0 0 -own.0 +shared.0 1 -shared.0 2 3"))
    backwards = UnitMap(table, {TARGET: range(4)}, order=t(0, 3, 1, 2))
    assert trace(backwards, t(0, 1, 2, 3)) == (steps("+own.0 0 -own.0 +shared.0 3 1 -shared.0 2"))
    with pytest.raises(
        UnsupportedError, match="layer 2 of 'target' reuses the data of row 'shared'"
    ):
        UnitMap(table, {TARGET: (2, 3)})


def test_sidecars_move_with_their_layer_and_are_no_rows() -> None:
    """Indexers on layers 1 and 3 only; the tensor that joins the layers' KV does not join them."""
    rows = [
        row("mla", range(4)),
        row("idx", (1, 3), kind="sidecar", unit="follower", follows="mla"),
        row("no", (4,), kind="none", entry_bytes=0, block_tokens=0),
    ]
    table = SpecTable(rows, grain=64, num_layers=5)
    units = UnitMap(table, {TARGET: range(5)}, tensors=[t(0, 1), t(2, 3)])
    assert trace(units, t(0, 1, 2, 3, 4)) == (
        steps("+mla.0 0 +idx.0 1 -mla.0 -idx.0 +mla.1 2 +idx.1 3 -mla.1 -idx.1 4")
    )


def test_draft_layers_are_a_part_of_their_own() -> None:
    table = SpecTable(
        [row("kv", range(2)), row("mtp", (0,), part="draft")],
        grain=64,
        num_layers={TARGET: 2, "draft": 1},
    )
    stage = {TARGET: range(2), "draft": range(1)}
    draft = LayerKey("draft", 0)
    units = UnitMap(table, stage)
    assert trace(units, [*t(0, 1), draft]) == (
        steps("+kv.0 0 -kv.0 +kv.1 1 -kv.1 +mtp.0 draft0 -mtp.0")
    )
    # a draft model that runs first, as some do
    first = UnitMap(table, stage, order=[draft, *t(0, 1)])
    assert trace(first, [*t(0, 1), draft])[:3] == steps("+mtp.0 draft0 -mtp.0")
    with pytest.raises(ConfigError, match="several model parts"):
        UnitMap(table, stage, tensors=[[LayerKey(TARGET, 0), draft]])


def test_uneven_stages_hold_each_unit_once() -> None:
    table = SpecTable([row("kv", range(5)), state("s", (5, 6))], grain=64, num_layers=7)
    cuts = [(0, 1, 2), (3,), (4, 5, 6)]
    maps = [UnitMap(table, {TARGET: cut}) for cut in cuts]
    assert [[u.layers for u in m.units] for m in maps] == [
        [(0,), (1,), (2,)],
        [(3,)],
        [(4,), (5,), (6,)],
    ]
    assert set(maps[1].by_row) == {"kv"}
    with pytest.raises(ConfigError, match="does not fit"):
        UnitMap(table, {TARGET: (0, 1, 2)}, tensors=[t(2, 3)])


def test_wrong_lists_are_refused() -> None:
    table = SpecTable([row("kv", range(3))], grain=64, num_layers=3)
    for order in (t(0, 1), t(0, 1, 1), t(0, 1, 2, 3)):
        with pytest.raises(ConfigError, match="real layer list"):
            UnitMap(table, {TARGET: range(3)}, order=order)
    with pytest.raises(ConfigError, match="does not compute"):
        UnitMap(table, {TARGET: range(2)}, called=t(2))


def test_random_maps_move_each_unit_once_and_in_time() -> None:
    """Whatever is called for: each unit is loaded once, before any of its layers runs, and saved once,
    after all of them have."""
    rng = random.Random(11)
    for _ in range(300):
        n = rng.randint(1, 12)
        kinds = [rng.choice("ksn") for _ in range(n)]
        rows = []
        for letter, name in (("k", "kv"), ("s", "s")):
            layers = tuple(i for i in range(n) if kinds[i] == letter)
            if layers:
                rows.append((row if letter == "k" else state)(name, layers))
        nothing = tuple(i for i in range(n) if kinds[i] == "n")
        if nothing:
            rows.append(row("no", nothing, kind="none", entry_bytes=0, block_tokens=0))
        table = SpecTable(rows, grain=64, num_layers=n)
        states = [i for i in range(n) if kinds[i] == "s"]
        rng.shuffle(states)
        tensors = [t(*states[: len(states) // 2])] if len(states) > 1 else []
        called = t(*(i for i in range(n) if rng.random() < 0.6))
        order = t(*rng.sample(range(n), n)) if rng.random() < 0.3 else t(*range(n))
        units = UnitMap(table, {TARGET: range(n)}, order=order, called=called, tensors=tensors)
        events = trace(units, called)
        stored = [i for i in range(n) if kinds[i] != "n"]
        assert sorted(i for u in units.units for i in u.layers) == stored
        for unit in units.units:
            name = f"{unit.group}.{unit.shard}"
            assert events.count(f"+{name}") == events.count(f"-{name}") == 1
            runs = [events.index(str(i)) for i in unit.layers]
            assert events.index(f"+{name}") < min(runs)
            assert events.index(f"-{name}") > max(runs)
