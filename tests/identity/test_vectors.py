"""The byte formats never change: checked-in vectors, derived by a script that shares no code with us."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucm_core.identity import (
    ChainExtra,
    ContentChain,
    GroupFacts,
    GroupIdentity,
    Manifest,
    ModelIdentity,
    chain_root,
    encode,
)

VECTORS = Path(__file__).parents[1] / "vectors"
KNOWN: dict[str, Any] = json.loads((VECTORS / "identity.json").read_text())

GQA = ModelIdentity(
    weights="id:example",
    kv_dtype="bf16",
    rope={"rope_type": "llama3", "rope_theta": 500000, "factor": 8},
    extra={"softcap": 30.0, "attention_chunk": None},
).group(
    GroupFacts("chain", heads=8, head_size=128, dtype="bf16", block_tokens=16), [5, 0, 1, 2], (4, 8)
)
STATE = ModelIdentity("id:example", "bf16", quantization="fp8").group(
    GroupFacts("snapshot", heads=32, head_size=64, dtype="fp32", block_tokens=None), [1], (0, 32)
)


def hexes(rows: np.ndarray) -> list[str]:
    return [row.tobytes().hex() for row in rows]


def test_derivation_script_gives_the_checked_in_file() -> None:
    derived = runpy.run_path(str(VECTORS / "derive_identity.py"))["derive"]()
    assert json.loads(json.dumps(derived)) == KNOWN


def test_page_hash_check_value() -> None:
    chain = ContentChain(16)
    chain.extend(np.arange(16, dtype=np.uint32))
    assert chain.last.hex() == "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea"


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case['name']} {dtype.__name__}")
        for case in KNOWN["chains"]
        for dtype in (np.uint32, np.uint64, np.int64)
        if max(case["tokens"]) <= np.iinfo(dtype).max
    ],
)
def test_chains(case: dict[str, Any], dtype: type) -> None:
    root = chain_root(case["lora_key"], case["cache_salt"])
    assert root.hex() == case["root"]
    chain = ContentChain(case["block_tokens"], root)
    chain.extend(np.array(case["tokens"], dtype))
    assert hexes(chain.links) == case["links"]


def test_extras() -> None:
    case = KNOWN["extras"]
    extras = [ChainExtra(p, n, kind, bytes.fromhex(d)) for p, n, kind, d in case["extras"]]
    chain = ContentChain(case["block_tokens"], extras=reversed(extras))
    chain.extend(np.array(case["tokens"], np.uint32))
    assert hexes(chain.links) == case["links"]


@pytest.mark.parametrize(
    ("identity", "case"), list(zip([GQA, STATE], KNOWN["seeds"], strict=True)), ids=["gqa", "state"]
)
def test_seeds_and_ids(identity: GroupIdentity, case: dict[str, Any]) -> None:
    assert encode(identity.encodable()).hex() == case["encoded"]
    seed = identity.seed()
    assert seed.hex() == case["seed"]
    chain = ContentChain(16)
    chain.extend(np.arange(67, dtype=np.uint32))
    assert hexes(chain.object_ids(seed)) == case["object_ids"]
    positions = [p for p, _ in case["snapshot_ids"]]
    assert hexes(chain.snapshot_ids(seed, positions)) == [h for _, h in case["snapshot_ids"]]


def test_manifest_digest() -> None:
    manifest = Manifest("default", 64, 2)
    assert manifest.digest.hex() == KNOWN["manifest"]["digest"]


SCRIPT = """
import numpy as np
from ucm_core.identity import *
rows = []
for extra in ({}, {"a": None}, {"a": "x", "b": ""}, {"b": ("n", ("m", 1, (None, 2.5)))}):
    model = ModelIdentity("id:w", "bf16", rope={"theta": 1e4, "b": True}, extra=extra)
    seed = model.group(GroupFacts("chain", 8, 64, "bf16", 16), {3, 1, 2}, (0, 8)).seed()
    for salt in (None, "", "s"):
        chain = ContentChain(16, chain_root(cache_salt=salt))
        chain.extend(np.arange(64, dtype=np.uint32))
        rows.append(chain.object_ids(seed).tobytes().hex())
print("\\n".join(rows))
"""


def test_b01_equal_in_every_interpreter() -> None:
    """Scheduler and worker processes are other interpreters: their ids must be ours."""
    outputs = []
    for hash_seed in (None, "0", "random"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if hash_seed is not None:
            env["PYTHONHASHSEED"] = hash_seed
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1] == outputs[2]
    rows = outputs[0].split()
    assert len(rows) == 12 and len(set(rows)) == 12
    # 4 blocks of 16 tokens, ids of 16 bytes
    assert all(len(row) == 4 * 32 for row in rows)
