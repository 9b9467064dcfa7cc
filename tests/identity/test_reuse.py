"""Identity end to end over files: other processes find the objects, other facts never do (B01, B05)."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucm_core.errors import ConfigError

from .reuse_process import BLOCKS, LAYERS, SHARD_BYTES, run

BASE: dict[str, Any] = {
    "kv_dtype": "bf16",
    "quantization": None,
    "rope": {"rope_theta": 10000.0, "factor": 1.0},
}


def write_model(path: Path, value: float = 1.0) -> str:
    """A checkpoint of one tensor."""
    data = np.full(64, value, np.float32).tobytes()
    header = {"w": {"dtype": "F32", "shape": [64], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path / "model")


def other_process(root: Path, action: str, facts: dict[str, Any], hash_seed: str) -> dict[str, Any]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    script = str(Path(__file__).with_name("reuse_process.py"))
    argv = [sys.executable, script, str(root), action, json.dumps(facts)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_b01_other_processes_find_and_load_what_one_dumped(tmp_path: Path, model: str) -> None:
    facts = {**BASE, "model_dir": model}
    assert other_process(tmp_path, "dump", facts, "0")["ok"]
    assert other_process(tmp_path, "find", facts, "random")["found"] == BLOCKS - 1
    loaded = run(str(tmp_path), "load", dict(facts))
    assert loaded["ok"] and loaded["found"] == BLOCKS - 1
    assert loaded["rows"] == list(range(1, BLOCKS * LAYERS + 1))
    assert loaded["memory"] == sum(loaded["rows"]) * SHARD_BYTES


def test_b05_one_fact_at_a_time(tmp_path: Path, model: str) -> None:
    base = {**BASE, "model_dir": model}
    assert run(str(tmp_path), "dump", dict(base))["ok"]
    for change in (
        {"kv_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"rope": {"rope_theta": 10000.0, "factor": 2.0}},
        {"rope": None},
        {"extra": {"attention_chunk": 8192}},
        {"model_dir": write_model(tmp_path / "tuned", 1.0000001)},
    ):
        other = run(str(tmp_path), "load", {**base, **change})
        assert other["found"] == -1 and not other["ok"], change
        assert other["memory"] == 0, "no old byte is read"
    moved = shutil.copytree(model, tmp_path / "another name")
    assert run(str(tmp_path), "find", {**base, "model_dir": str(moved)})["found"] == BLOCKS - 1


def test_b05_other_block_tokens_in_the_same_directory(tmp_path: Path, model: str) -> None:
    facts = {**BASE, "model_dir": model}
    assert run(str(tmp_path), "dump", dict(facts))["ok"]
    with pytest.raises(ConfigError, match=r"block_tokens 64, this start asks for 128"):
        run(str(tmp_path), "find", {**facts, "block_tokens": 128})
