"""``ucm spec``: what it prints for published configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ucm_core.cli import build_cli
from ucm_core.errors import ConfigError, UnsupportedError

CONFIGS = Path(__file__).resolve().parents[1] / "spec/model_configs"
HYBRID = str(CONFIGS / "Qwen--Qwen3.5-35B-A3B_config.json")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(build_cli(), ["spec", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_groups_units_and_bytes() -> None:
    """Derived by hand in tests/spec/model_tables.py; 15,625 blocks of 1,310,720 B are 19.07 GiB."""
    out = run(HYBRID, "--tp", "8", "--pp", "2")
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines()}
    state = "2146304 a state - 64389120 a state 61.41 MiB a checkpoint 61.41 MiB"
    assert rows["snapshot.h32x128.fp32+bf16"].endswith(state)
    full = "layer intersection 64 - 2048 20480 1310720 19.07 GiB 19.07 GiB"
    assert rows["chain.h2x256.bf16"].endswith(full)
    assert "40 target layers, 1 draft layers" in out
    assert "hits at multiples of 64, checkpoints at multiples of 64" in out
    # 10 layers in 20 (5 full ones, one of two heads on each rank): 5 x 1024; the draft layer is last
    assert "stage 0 (target 0-19), each of 8 ranks: 20 units, 5120 bytes a token, 3.838 MiB" in out
    assert "stage 1 (target 20-39, draft 0), each of 8 ranks: 21 units, 6144 bytes a token" in out


def test_windows_need_less_than_is_stored() -> None:
    out = run(str(CONFIGS / "openai--gpt-oss-20b_config.json"))
    (line,) = [line for line in out.splitlines() if ".w128" in line]
    assert line.split()[-4:] == ["22.89", "GiB", "3", "MiB"]  # 12 x 2048 x 128 tokens


def test_json() -> None:
    told = json.loads(run(HYBRID, "--json", "--pp", "2", "--block-tokens", "128"))
    state, full, draft = told["groups"]
    assert (state["bytes_per_block"], full["bytes_per_token"]) == (64_389_120, 20_480)
    assert full["block_tokens"] == told["checkpoint_grid"] == 128
    assert draft["part"] == "draft"
    assert [len(stage["layers"]["target"]) for stage in told["stages"]] == [20, 20]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="not a readable config.json"):
        run(str(CONFIGS / "nothing.json"))
    with pytest.raises(UnsupportedError, match="do not spread evenly"):
        run(HYBRID, "--tp", "5")
    with pytest.raises(ConfigError, match="unknown element type"):
        run(HYBRID, "--kv-dtype", "int3")


def test_a_directory_and_another_cache_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(HYBRID).read_text())
    assert "chain.h2x256.fp8_e4m3" in run(str(tmp_path), "--kv-dtype", "fp8_e4m3")
