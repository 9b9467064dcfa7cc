"""The fictional stress model of the specification as rows: 96 layers of every kind."""

from __future__ import annotations

import math

from ucm_core.identity import ModelIdentity
from ucm_core.spec import (
    GroupSpec,
    KeySpace,
    Kind,
    LayerSpec,
    RankRule,
    Retention,
    SpecTable,
    Unit,
    object_shape,
    units,
)

UNION = RankRule.UNION


def spread(counts: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Layer numbers, interleaved evenly as such models do."""
    placed = sorted(
        (i / n, at, name) for at, (name, n) in enumerate(counts.items()) for i in range(n)
    )
    order = [name for _, _, name in placed]
    return {name: tuple(i for i, n in enumerate(order) if n == name) for name in counts}


LAYERS = spread(
    {"mla": 16, "csa_c16": 16, "swa": 24, "mamba2": 20, "kda": 8, "dsa_index": 4, "cross": 8}
)

X_HYBRID_96 = SpecTable(
    [
        GroupSpec("mla", Kind.CHAIN, LAYERS["mla"], 128, 512, rank_rule=UNION),
        GroupSpec("csa_c16", Kind.CHAIN, LAYERS["csa_c16"], 128, 1024, compression=16),
        GroupSpec("swa", Kind.CHAIN, LAYERS["swa"], 128, 128, window=1024, unit=Unit.WINDOW),
        GroupSpec(
            "mamba2",
            Kind.SNAPSHOT,
            LAYERS["mamba2"],
            64,
            512,
            unit=Unit.ROW,
            retention=Retention(1024),
        ),
        GroupSpec(
            "kda", Kind.SNAPSHOT, LAYERS["kda"], 1, 4096, retention=Retention(budget_bytes=1 << 30)
        ),
        GroupSpec(
            "dsa_index",
            Kind.SIDECAR,
            LAYERS["dsa_index"],
            128,
            64,
            follows="mla",
            unit=Unit.FOLLOWER,
            role="indexer",
            store="index",
        ),
        GroupSpec("cross", Kind.NONE, LAYERS["cross"]),
    ],
    grain=128,
    num_layers=96,
)


def test_rows_cover_96_layers_in_at_most_ten_rows() -> None:
    assert sorted(i for row in X_HYBRID_96.rows for i in row.layers) == list(range(96))
    assert len(X_HYBRID_96.rows) <= 10
    assert [row.name for row in X_HYBRID_96.chains] == ["mla", "csa_c16", "swa"]
    assert [row.name for row in X_HYBRID_96.snapshots] == ["mamba2", "kda"]
    assert X_HYBRID_96.common_grid == 128


def test_bytes_by_hand() -> None:
    """16 MLA layers x 512 B x 1M tokens is about 8 GB."""
    mla, csa = X_HYBRID_96["mla"], X_HYBRID_96["csa_c16"]
    assert len(mla.layers) * mla.bytes_per_token * 10**6 == 8_192_000_000
    assert csa.bytes_per_token == 64
    assert (mla.shard_bytes, csa.shard_bytes) == (128 * 512, 8 * 1024)
    assert X_HYBRID_96["mamba2"].shard_bytes == 512


def test_grids_finer_than_the_chain_are_warned_about() -> None:
    text = "\n".join(X_HYBRID_96.warnings)
    assert "'mamba2' (64)" in text and "'mla' (128 tokens)" in text
    assert len(X_HYBRID_96.warnings) == 6  # three chain rows x two finer grids


def test_pp2_gives_48_layers_a_stage_and_ids_of_their_own() -> None:
    stages = {"target": [range(48), range(48, 96)]}
    keys = KeySpace(X_HYBRID_96, ModelIdentity("id:x", "bf16"), stages=stages)
    seeds = set()
    for row in X_HYBRID_96.rows:
        if row.kind is Kind.NONE:
            continue
        at = keys.of(row.name)
        assert len(at) == 2
        assert all(i < 48 for i in at[0].coordinate.layers)
        assert all(i >= 48 for i in at[1].coordinate.layers)
        assert at[0].coordinate.layers + at[1].coordinate.layers == row.layers
        seeds |= {s.seed for s in at}
    assert len(seeds) == 12


def test_units_of_rows_that_share_tensors() -> None:
    """Mamba layers share tensors in fours, one is alone: mixed, none left out."""
    row = X_HYBRID_96["mamba2"]
    keys = KeySpace(X_HYBRID_96, ModelIdentity("id:x", "bf16"))
    (at,) = keys.of("mamba2")
    tensors = [row.layers[i : i + 4] for i in range(0, 16, 4)]
    made = units(row, at.coordinate, tensors)
    assert len(made) == 4 + 4
    assert [(u.shard, u.shards) for u in made[:5]] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 1)]
    assert object_shape(made).shard_count == len(row.layers)
    assert sorted(i for u in made for i in u.layers) == list(row.layers)
    assert (made[0].first, made[0].last) == (row.layers[0], row.layers[3])


def test_the_same_rows_come_from_declared_layers() -> None:
    """What an engine declares layer by layer groups into the same seven rows."""
    kinds = {
        "mla": {"kind": "chain", "entry_bytes": 512, "rank_rule": "union", "dtype": "bf16"},
        "csa_c16": {"kind": "chain", "entry_bytes": 1024, "compression": 16, "dtype": "uint8"},
        "swa": {"kind": "chain", "entry_bytes": 128, "window": 1024, "dtype": "bf16"},
        "mamba2": {"kind": "snapshot", "entry_bytes": 512, "grid": 64, "dtype": "fp32"},
        "kda": {"kind": "snapshot", "entry_bytes": 4096, "heads": 4, "dtype": "fp32"},
        "dsa_index": {
            "kind": "sidecar",
            "entry_bytes": 64,
            "role": "indexer",
            "follows": "layer.0",
        },
        "cross": {"kind": "none"},
    }
    assert LAYERS["mla"][0] == 0
    declared = [
        LayerSpec(i, f"layer.{i}", **fields)  # type: ignore[arg-type]
        for name, fields in kinds.items()
        for i in LAYERS[name]
    ]
    table = SpecTable.from_layers(declared, grain=128, retention=Retention(1024))
    assert len(table.rows) == 7
    by_layers = {row.layers: row for row in table.rows}
    for name, numbers in LAYERS.items():
        row, expected = by_layers[numbers], X_HYBRID_96[name]
        assert row.kind is expected.kind
        assert row.block_tokens == expected.block_tokens
        assert row.window == expected.window
    index = by_layers[LAYERS["dsa_index"]]
    assert table[index.follows or ""].layers == LAYERS["mla"]
    assert table.common_grid == math.lcm(128, 128, 128)
