"""Published configurations against tables derived by hand, and what the reader refuses to guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.spec import Kind, Retention, SpecTable, Unit
from ucm_core.spec.from_config import read_model_config
from ucm_core.spec.from_config.formulas import Formula
from ucm_core.spec.sizes import even_stages, live_bytes, rank_share, row_sizes

from .model_tables import SUMS, TABLES, Group

CONFIGS = Path(__file__).parent / "model_configs"


def table_of(name: str, **options: Any) -> SpecTable:
    return read_model_config(CONFIGS / f"{name}_config.json", **options).table(64)


def test_every_file_has_a_table() -> None:
    assert {p.name.removesuffix("_config.json") for p in CONFIGS.glob("*.json")} == set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_groups_are_those_derived_by_hand(name: str) -> None:
    table = table_of(name)
    names = [row.name for row in table.rows]
    found = [
        Group(
            row.kind.value,
            row.layers,
            row.entry_bytes,
            float(
                row_sizes(row).per_block if row.kind is Kind.SNAPSHOT else row_sizes(row).per_token
            ),
            heads=row.heads,
            head_size=row.head_size,
            rank=row.rank_rule.value,
            window=row.window,
            ratio=row.compression,
            block=row.block_tokens if row.kind is not Kind.NONE else 64,
            role=row.role,
            follows=None if row.follows is None else names.index(row.follows),
            part=row.part,
            dtype=row.dtype,
        )
        for row in table.rows
    ]
    assert found == TABLES[name]
    units = {Kind.SIDECAR: Unit.FOLLOWER}
    for row in table.rows:
        expected = Unit.WINDOW if row.window else units.get(row.kind, Unit.LAYER)
        assert row.unit is expected


@pytest.mark.parametrize("name", SUMS)
def test_sums_multiplied_out(name: str) -> None:
    sizes = [row_sizes(row) for row in table_of(name).rows]
    assert (sum(s.per_block for s in sizes), sum(s.per_million for s in sizes)) == SUMS[name]


def test_what_continuing_needs_is_less_than_what_is_stored() -> None:
    """gpt-oss at 960,000 tokens: 128 tokens of the sliding rows (two blocks), all of the full ones."""
    sliding, full = table_of("openai--gpt-oss-20b").rows
    assert live_bytes(sliding, 960_000) == 128 * 24_576
    assert live_bytes(full, 960_000) == 960_000 * 24_576
    state, nothing, _ = table_of("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").rows
    assert (live_bytes(state, 960_000), live_bytes(nothing, 960_000)) == (49_082_368, 0)


def test_cache_types_and_grains() -> None:
    """fp8 KV halves what is in the KV type and leaves fp8 indexers and fp32 states alone."""
    mla, index, *_ = table_of("deepseek-ai--DeepSeek-V3.2", kv_dtype="fp8_e4m3").rows
    assert (mla.entry_bytes, mla.dtype, index.entry_bytes) == (576, "fp8_e4m3", 132)
    state, full, _ = table_of("Qwen--Qwen3.5-35B-A3B", kv_dtype="float8_e4m3fn").rows
    assert (state.entry_bytes, full.entry_bytes) == (2_146_304, 1024)
    model = read_model_config(CONFIGS / "deepseek-ai--DeepSeek-V4-Flash_config.json", grain=32)
    assert [row.block_tokens for row in model.table(32).rows] == [32, 32, 32, 128, 32]
    with pytest.raises(ConfigError, match="unknown element type 'int3'; known are bf16"):
        table_of("Qwen--Qwen3-0.6B", kv_dtype="int3")


def test_even_stages_and_shares_of_ranks() -> None:
    """60 layers over 8 stages: 7 each and 4 left over, given from behind to those before the last."""
    table = table_of("MiniMaxAI--MiniMax-M3")
    stages = even_stages(table, 8)
    assert [len(stage) for stage in stages["target"]] == [7, 7, 7, 8, 8, 8, 8, 7]
    assert [len(stage) for stage in stages["draft"]] == [0] * 7 + [7]
    assert [len(stage) for stage in even_stages(table, 1)["target"]] == [60]
    full, index, *_ = table.rows
    # 4 kv heads over 8 ranks: each rank holds a copy of one: a quarter of 7 layers x 2048
    assert rank_share(full, set(range(7)), 8) == (3584, 64 * 3584)
    # index keys are equal on all ranks: 4 of the 57 layers (3-6) whole
    assert rank_share(index, set(range(7)), 8) == (4 * 256, 64 * 4 * 256)
    with pytest.raises(UnsupportedError, match="evenly"):
        rank_share(full, set(range(7)), 3)
    with pytest.raises(UnsupportedError, match="61 pipeline stages for 60 layers"):
        even_stages(table, 61)


# -- what is not guessed ---------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def read(tmp_path: Path, **fields: Any) -> SpecTable:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PLAIN, **fields}))
    return read_model_config(tmp_path).table(64, Retention(1024))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown word": (
        {"layer_types": ["full_attention"] * 3 + ["ring_attention"]},
        "'ring_attention'",
    ),
    "unknown character": ({"hybrid_override_pattern": "*R*-"}, "a layer 'R', which no rule knows"),
    "list too long": (
        {"layer_types": ["full_attention"] * 5},
        "names 5 layers, but the model has 4",
    ),
    "list too short": (
        {"layer_types": ["full_attention"] * 3, "num_nextn_predict_layers": 2},
        "4 \\(or 6 with its 2 draft layers\\)",
    ),
    "list of a target and half its drafts": (
        {"compress_ratios": [0] * 5, "num_nextn_predict_layers": 2, "sliding_window": 8},
        "names 5 layers",
    ),
    "unread state": ({"rwkv_head_size": 64}, "rwkv_head_size say that layers keep something"),
    "unread mamba": ({"mamba_d_state": 16}, "mamba_d_state say"),
    "missing number": ({"layer_types": ["mamba"] * 4}, "needs mamba_expand"),
    "missing layers": ({"num_hidden_layers": None}, "needs num_hidden_layers or n_layers"),
    "no number": ({"num_key_value_heads": "two"}, "must be a whole number, got 'two'"),
    "unknown dtype": ({"torch_dtype": "posit16"}, "unknown element type 'posit16'"),
    "index beyond": ({"cross_attention_layers": [1, 9]}, "beyond the 4 there are"),
    "interval of zero": ({"full_attention_interval": -1}, "at least 1, got -1"),
    "nothing to reuse": (
        {"num_kv_shared_layers": 4, "layer_types": ["full_attention"] * 4},
        "of which there is none",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_rule_covers_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **fields)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a readable config.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        read_model_config(tmp_path)


def kinds(table: SpecTable) -> dict[str, tuple[int, ...]]:
    return {row.kind.value + (".w" if row.window else ""): row.layers for row in table.rows}


PATTERNS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "plain": ({}, {"chain": (0, 1, 2, 3)}),
    "window everywhere": ({"sliding_window": 32}, {"chain.w": (0, 1, 2, 3)}),
    "window switched off": (
        {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2},
        {"chain": (0, 1, 2, 3)},
    ),
    "window from a layer on": (
        {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3},
        {"chain": (0, 1, 2), "chain.w": (3,)},
    ),
    "every second full": (
        {"sliding_window": 32, "sliding_window_pattern": 2},
        {"chain.w": (0, 2), "chain": (1, 3)},
    ),
    "a default of the model's own code": (
        {"sliding_window": 32, "model_type": "gemma2"},
        {"chain.w": (0, 2), "chain": (1, 3)},
    ),
    "chunks where there is rope": (
        {"attention_chunk_size": 128, "no_rope_layers": [1, 0, 1, 1]},
        {"chain.w": (0, 2, 3), "chain": (1,)},
    ),
    "last layers reuse": (
        {
            "num_kv_shared_layers": 2,
            "sliding_window": 32,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        {"chain": (0,), "chain.w": (1,), "follower": (2,)},
    ),
    "cross attention": ({"cross_attention_layers": [1, 3]}, {"chain": (0, 2), "none": (1, 3)}),
    "short convolutions": (
        {"conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention", "conv"]},
        {"snapshot": (0, 1, 3), "chain": (2,)},
    ),
    "period and offset": (
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_expand": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
        },
        {"snapshot": (0, 2), "chain": (1, 3)},
    ),
    "kda counted from one": (
        {
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            }
        },
        {"snapshot": (0, 1, 2), "chain": (3,)},
    ),
}


@pytest.mark.parametrize(("fields", "expected"), PATTERNS.values(), ids=PATTERNS.keys())
def test_patterns(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, tuple[int, ...]]
) -> None:
    found = kinds(read(tmp_path, **fields))
    if "follower" in expected:  # one row for each kind that is reused
        assert found.pop("follower") == (3,) and expected.pop("follower") == (2,)
    assert found == expected


def test_followers_belong_to_the_last_earlier_layer_of_their_kind(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"] * 2
    table = read(tmp_path, num_kv_shared_layers=2, sliding_window=32, layer_types=types)
    followers = {
        r.layers: table[r.follows or ""].layers for r in table.rows if r.kind is Kind.FOLLOWER
    }
    assert followers == {(2,): (0,), (3,): (1,)}


def test_states_by_hand(tmp_path: Path) -> None:
    """Channels without heads: 2 x 64 channels x (16 fp32 + 3 inputs in bf16)."""
    table = read(
        tmp_path,
        attn_layer_period=4,
        mamba_expand=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_ssm_dtype="float32",
    )
    (state,) = table.snapshots
    assert state.entry_bytes == 128 * (16 * 4 + 3 * 2)
    assert state.block_tokens == 64 and state.retention.interval == 1024


@pytest.mark.parametrize(
    "bad", ["a.b", "f(x)", "x ** 2", "x if y else z", "'text'", "a < b < c", "1 +", "1.5"]
)
def test_formulas_are_small(bad: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        Formula(bad)


def test_formulas_compute() -> None:
    assert Formula("a + 4 * ((a + 127) // 128) - -b % 3")({"a": 128, "b": 1}) == 128 + 4 - 2
    assert Formula("a > 0 and not b")({"a": 1, "b": 0}) == 1
    assert Formula("a == 4 or missing > 1")({"a": 4}) == 1
    with pytest.raises(KeyError, match="missing"):
        Formula("a == 4 or missing > 1")({"a": 5})
