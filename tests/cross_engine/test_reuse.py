"""What one engine saved another serves: hits by the engine's own count, tokens of its own run.

fp32, where equal means equal; latent attention (bf16) is compared with the engine's own hit at the same
split. Each row of the matrix in docs/sharing.md names a test of this folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_harness import EnginePool
from engine_harness.tamper import objects
from engine_pairs import Pair, answers, hits
from sglang_cases import PAGE, PREFIX, TAIL, prompt

#: One prompt for each block size of vLLM.
BLOCKS = (32, 64, 128)
PROMPTS = {block: prompt(block, PREFIX + TAIL) for block in BLOCKS}
#: vLLM saves whole stored blocks; the namespace of both engines has blocks of 64 tokens.
PAGES = PREFIX // PAGE


@pytest.fixture(scope="module")
def pair(vllm: EnginePool, sglang: EnginePool) -> Pair:
    return Pair(vllm, sglang)


@pytest.fixture(scope="module")
def own(pair: Pair) -> dict[str, list[list[int]]]:
    """What each engine answers without any cache."""
    prompts = list(PROMPTS.values())
    return {
        "vllm": answers(pair.run("vllm", prompts)),
        "sglang": answers(pair.run("sglang", prompts)),
    }


@pytest.fixture(scope="module")
def from_vllm(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by three vLLM engines with different blocks."""
    root = tmp_path_factory.mktemp("from-vllm")
    for block in BLOCKS:
        pair.run("vllm", [PROMPTS[block]], root, stored=1, block_size=block)
    assert len(objects(root)) == PAGES * len(BLOCKS)
    return root


@pytest.fixture(scope="module")
def from_sglang(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("from-sglang")
    pair.run("sglang", list(PROMPTS.values()), root, stored=PAGES * len(BLOCKS))
    return root


def test_vllm_saves_sglang_serves(
    pair: Pair, from_vllm: Path, own: dict[str, list[list[int]]]
) -> None:
    served = pair.run("sglang", list(PROMPTS.values()), from_vllm)
    assert hits(served) == [PREFIX] * len(BLOCKS)
    assert answers(served) == own["sglang"]
    assert len(objects(from_vllm)) == PAGES * len(BLOCKS), "nothing was stored twice"


@pytest.mark.parametrize("block", BLOCKS)
def test_sglang_saves_vllm_serves(
    pair: Pair, from_sglang: Path, own: dict[str, list[list[int]]], block: int
) -> None:
    """A hit ends at a whole block of vLLM: 320 tokens are two blocks of 128 and a half."""
    served = pair.run("vllm", list(PROMPTS.values()), from_sglang, block_size=block)
    assert hits(served) == [PREFIX // block * block] * len(BLOCKS)
    assert answers(served) == own["vllm"]


def test_another_page_size_is_a_clean_miss(
    pair: Pair, from_vllm: Path, own: dict[str, list[list[int]]]
) -> None:
    served = pair.run("sglang", list(PROMPTS.values()), from_vllm, page_size=32)
    assert hits(served) == [0] * len(BLOCKS)
    assert answers(served) == own["sglang"]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"json_model_override_args": '{"rope_theta": 20000.0}'},
    ],
    ids=["another element type", "another rope"],
)
def test_other_bytes_are_a_clean_miss(pair: Pair, from_vllm: Path, change: dict[str, str]) -> None:
    served = pair.run("sglang", [PROMPTS[64]], from_vllm, **change)
    assert hits(served) == [0]
    assert answers(served) == answers(pair.run("sglang", [PROMPTS[64]], **change))
