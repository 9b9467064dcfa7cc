"""One rank saved, two ranks serve, and back, across engines: head slices of one namespace; latent rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_harness import EnginePool
from engine_harness.tamper import objects
from engine_pairs import Engine, Pair, answers, hits
from sglang_cases import PAGE, PREFIX, TAIL, prompt

TOKENS = prompt(5, PREFIX + TAIL)
PAGES = PREFIX // PAGE
WAYS: tuple[tuple[Engine, Engine], ...] = (("vllm", "sglang"), ("sglang", "vllm"))


@pytest.fixture(scope="module")
def sliced(vllm: EnginePool, sglang: EnginePool) -> Pair:
    """A namespace that keeps the heads in two objects."""
    return Pair(vllm, sglang, options={"namespace": "shared", "head_slices": 2})


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=["one saves", "two save"])
@pytest.mark.parametrize("way", WAYS, ids=" to ".join)
def test_head_slices(
    sliced: Pair, tmp_path: Path, way: tuple[Engine, Engine], ranks: tuple[int, int]
) -> None:
    writer, reader = way
    sliced.run(writer, [TOKENS], tmp_path, stored=2 * PAGES, tp=ranks[0])
    assert len(objects(tmp_path)) == 2 * PAGES
    served = sliced.run(reader, [TOKENS], tmp_path, tp=ranks[1])
    assert hits(served) == [PREFIX]
    assert answers(served) == answers(sliced.run(reader, [TOKENS], tp=ranks[1]))


#: Where both engines agree, bf16 rounding decided nothing.
AGREED = 4
LATENT = [prompt(seed, PREFIX + TAIL) for seed in (5, 7)]


@pytest.fixture(scope="module")
def latent(vllm: EnginePool, sglang: EnginePool) -> Pair:
    return Pair(vllm, sglang, model="deepseek_yarn")


@pytest.fixture(scope="module")
def agreed(latent: Pair) -> list[list[int]]:
    """Of each prompt, the tokens that both engines answer from their own caches, hit at the same split."""
    own = [answers(latent.run(engine, LATENT, warm=True))[1::2] for engine in ("vllm", "sglang")]
    found = []
    for pair in zip(*own, strict=True):
        same = [a == b for a, b in zip(*pair, strict=True)]
        found.append(pair[0][: (same + [False]).index(False)])
    assert min(map(len, found)) >= AGREED, f"the engines disagree by themselves: {own}"
    return found


@pytest.mark.parametrize("way", WAYS, ids=" to ".join)
def test_latent_attention(
    latent: Pair, agreed: list[list[int]], tmp_path: Path, way: tuple[Engine, Engine]
) -> None:
    """bf16: the KV of the two engines differs in its last bits, so a near tie may fall either way."""
    writer, reader = way
    pages = len(LATENT) * PAGES
    latent.run(writer, LATENT, tmp_path, stored=pages)
    assert len(objects(tmp_path)) == pages
    served = latent.run(reader, LATENT, tmp_path)
    assert hits(served) == [PREFIX] * len(LATENT)
    for got, wanted in zip(answers(served), agreed, strict=True):
        assert got[: len(wanted)] == wanted
