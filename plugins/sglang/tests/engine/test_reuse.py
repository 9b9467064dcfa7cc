"""A second SGLang process serves prompts from files: same tokens, hits by SGLang's own count."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_harness import EnginePool, EngineResult, Round
from engine_harness.tamper import DAMAGES, objects, stray_files
from sglang_cases import ANSWER, PAGE, PREFIX, TAIL, answers, job, one_by_one, prompt, stored_tokens
from sglang_cases import two_ranks as two

KINDS = ("flip_byte", "negate_floats", "truncate", "empty", "delete", "zero_data")
#: A prompt nobody damages, and one for each kind of damage.
PROMPTS = [prompt(seed, PREFIX + TAIL) for seed in range(len(KINDS) + 1)]


@pytest.fixture(scope="module")
def saved(
    engines: EnginePool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, EngineResult]:
    root = tmp_path_factory.mktemp("kv")
    pages = len(PROMPTS) * PREFIX // PAGE
    run = engines.run(job("llama", one_by_one(PROMPTS), root, stored=pages)).require_ok()
    assert stored_tokens(run) == [0] * len(PROMPTS), "computed, not served"
    return root, run


def test_a_second_process_hits_and_answers_alike(
    engines: EnginePool, saved: tuple[Path, EngineResult]
) -> None:
    """And B04: with an extra key of its own, the same tokens are another prompt."""
    root, first = saved
    shared = PROMPTS[0][:PREFIX] + prompt(99, 30)
    rounds = [*one_by_one([PROMPTS[0], shared]), Round([PROMPTS[0]], ANSWER, cache_salt="tenant")]
    second = engines.run(job("llama", rounds, root)).require_ok()
    assert stored_tokens(second) == [PREFIX, PREFIX, 0]
    got = answers(second)
    assert got[0] == answers(first)[0] == got[2]
    assert not stray_files(root)


def test_damaged_pages_cost_a_recompute(
    engines: EnginePool, saved: tuple[Path, EngineResult], tmp_path: Path
) -> None:
    """One page of each prompt is damaged, each in another way: right tokens, shorter hits."""
    import shutil

    root, first = saved
    copy = tmp_path / "kv"
    shutil.copytree(root, copy)
    damaged = 2  # page of the prompt
    for kind, tokens in zip(KINDS, PROMPTS[1:], strict=True):
        DAMAGES[kind](page_file(copy, tokens, damaged))
    second = engines.run(job("llama", one_by_one(PROMPTS), copy)).require_ok()
    assert answers(second) == answers(first)
    whole, *rest = stored_tokens(second)
    assert whole == PREFIX
    assert rest == [damaged * PAGE] * len(KINDS)


def page_file(root: Path, tokens: list[int], page: int) -> Path:
    """The file of a page of a prompt, found by its key as the adapter makes it."""
    import json

    import numpy as np

    from ucm_core.identity import ContentChain, model_config, object_ids, weights_identity
    from ucm_core.spec import SpecTable, attention_layer

    directory = Path(job("llama", []).model)
    config = json.loads((directory / "config.json").read_text())
    identity = model_config.model_identity(
        weights_identity(directory).value,
        config,
        kv_dtype="fp32",
        compute_dtype="float32",
        quantization=None,
        context_length=config["max_position_embeddings"],
    )
    heads, size = config["num_key_value_heads"], config["head_dim"]
    layers = config["num_hidden_layers"]
    row = SpecTable.from_layers(
        [
            attention_layer(
                i, heads=heads, head_size=size, entry_bytes=8 * heads * size, dtype="fp32"
            )
            for i in range(layers)
        ],
        grain=PAGE,
    ).rows[0]
    chain = ContentChain(PAGE)
    chain.extend(np.array(tokens, dtype=np.int64))
    seed = identity.group(row.facts, range(layers), (0, heads)).seed()
    wanted = bytes(object_ids(seed, chain.links[page : page + 1])[0]).hex()
    (found,) = [path for path in objects(root) if path.name == wanted]
    return found


def test_two_ranks(engines: EnginePool, tmp_path: Path) -> None:
    """Each rank saves its heads; both must have a page for it to count."""
    prompts = PROMPTS[:2]
    pages = 2 * PREFIX // PAGE
    first = engines.run(job("llama", one_by_one(prompts), tmp_path, 2 * pages, **two()))
    first.require_ok()
    assert len(objects(tmp_path)) == 2 * pages
    halves = sorted(objects(tmp_path), key=lambda p: p.stat().st_mtime_ns)
    DAMAGES["flip_byte"](halves[-1])
    second = engines.run(job("llama", one_by_one(prompts), tmp_path, **two())).require_ok()
    assert answers(second) == answers(first)
    assert stored_tokens(second)[0] == PREFIX
    assert stored_tokens(second)[1] < PREFIX, "half of a page is no page"


def test_latent_attention_with_one_writer(engines: EnginePool, tmp_path: Path) -> None:
    """bf16: compared with SGLang's own hit at the same split. Rank 0 writes, both ranks read."""
    tokens = PROMPTS[0]
    again = Round([tokens], ANSWER)  # device and host cache are warm: SGLang's own hit
    setup = two()
    setup["engine"] |= {"dtype": "bfloat16"}
    pages = PREFIX // PAGE
    rounds = [Round([tokens], ANSWER), again]
    first = engines.run(job("deepseek_yarn", rounds, tmp_path, pages, **setup)).require_ok()
    own = first.outputs[1][0]
    assert own.cached == PREFIX
    assert own.stored == 0
    assert len(objects(tmp_path)) == pages, "written once, not once a rank"
    second = engines.run(job("deepseek_yarn", one_by_one([tokens]), tmp_path, **setup)).require_ok()
    assert stored_tokens(second) == [PREFIX]
    assert answers(second) == [own.tokens]
