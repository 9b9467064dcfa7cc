"""A second process serves a shared prefix from UCM's files, with the very same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_cases import (
    ANSWER,
    BLOCK,
    CORPUS,
    LOAD_FAILED,
    LOADED,
    PREFIX,
    SAVE_FAILED,
    SAVED,
    SHARED,
    UNRELATED,
    Saved,
    Truth,
    answers,
    checkpoint,
    corpus_job,
    one_by_one,
    ucm,
)
from engine_harness import EngineJob, EnginePool, Round, prompt
from engine_harness.job import EXTERNAL_HITS, EXTERNAL_QUERIES
from engine_harness.tamper import objects, stray_files

MODELS = ["qwen3", "llama", "deepseek_v3"]


@pytest.mark.parametrize("model", MODELS)
def test_second_process_hits_with_the_tokens_of_a_local_hit(
    model: str, engines: EnginePool, saved: Callable[[str], Saved], truth: Callable[[str], Truth]
) -> None:
    store = saved(model)
    first = store.run
    assert answers(first)[0] == truth(model).cold[0], "saving changed what the engine answers"
    assert first.external_hits(0) == 0
    assert first.prometheus[SAVED] >= PREFIX // BLOCK
    assert first.prometheus.get(SAVE_FAILED, 0) == 0
    assert objects(store.directory)
    assert stray_files(store.directory) == []

    second = engines.run(corpus_job(model, connector=ucm(store.directory))).require_ok()
    assert second.pid != first.pid
    for index in range(len(CORPUS)):
        assert second.external_hits(index) == PREFIX
        assert second.local_hits(index) == 0
        assert second.metric(EXTERNAL_QUERIES, index) == len(CORPUS[index])
        assert second.outputs[index][0].cached == PREFIX
    assert answers(second)[1:] == truth(model).local
    if model != "deepseek_v3":  # fp32: where the split lies does not show in the tokens
        assert answers(second) == truth(model).cold
    assert second.prometheus[LOADED] == len(CORPUS) * PREFIX // BLOCK
    assert second.prometheus.get(LOAD_FAILED, 0) == 0


def test_one_batch_of_requests_that_share_a_prefix_with_chunked_prefill(
    engines: EnginePool, saved: Callable[[str], Saved], truth: Callable[[str], Truth], kv_dir: Path
) -> None:
    chunks = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}
    batch = [Round([*CORPUS, CORPUS[0]], max_tokens=ANSWER)]
    expected = [*truth("qwen3").cold, truth("qwen3").cold[0]]
    cold = engines.run(corpus_job(connector=ucm(kv_dir), engine=chunks, rounds=batch)).require_ok()
    assert answers(cold) == expected
    assert len(objects(kv_dir)) == len(objects(saved("qwen3").directory)), "blocks saved once each"
    warm = engines.run(corpus_job(connector=ucm(kv_dir), engine=chunks, rounds=batch)).require_ok()
    assert answers(warm) == expected
    assert [o.cached for o in warm.outputs[0]] == [PREFIX] * 4
    assert warm.external_hits() + warm.local_hits() == 4 * PREFIX


def test_a_later_turn_hits_the_blocks_that_the_first_turn_generated(
    engines: EnginePool, kv_dir: Path
) -> None:
    first_turn = prompt(31, 200)
    job = EngineJob(checkpoint("qwen3"), [Round([first_turn], max_tokens=100)])
    job.connector = ucm(kv_dir)
    reply = engines.run(job).require_ok().tokens()[0]
    second_turn = first_turn + reply + prompt(32, 25)
    job.rounds = [Round([second_turn], max_tokens=ANSWER)]
    again = engines.run(job).require_ok()
    # 299 tokens have KV (the last generated one was never fed back): 4 whole blocks.
    assert again.external_hits() == 299 // BLOCK * BLOCK
    assert again.external_hits() > len(first_turn)
    job.connector = None
    assert again.tokens() == engines.run(job).require_ok().tokens()


def test_prompts_of_one_block_and_one_more_token_sent_twice(
    engines: EnginePool, kv_dir: Path
) -> None:
    """B11: a hit never takes the last token, with vLLM's own cache off."""
    prompts = [prompt(41, BLOCK), prompt(42, BLOCK + 1), prompt(43, 2 * BLOCK)]
    job = EngineJob(checkpoint("qwen3"), engine={"enable_prefix_caching": False})
    job.rounds = [Round([tokens], max_tokens=ANSWER) for tokens in prompts] * 2
    plain = answers(engines.run(job).require_ok())
    job.connector = ucm(kv_dir)
    # The deepest of vLLM's own blocks (32) that leaves a token: part of a stored block is loaded.
    most = [BLOCK - 32, BLOCK, 2 * BLOCK - 32]
    for hits in ([0, 0, 0, *most], most * 2):
        result = engines.run(job).require_ok()
        assert [result.external_hits(i) for i in range(len(job.rounds))] == hits
        assert answers(result) == plain


def test_prompt_logprobs_are_whole_and_take_no_hit(engines: EnginePool, kv_dir: Path) -> None:
    """B17: a request that needs every prompt token computed is not served, but is saved."""
    tokens = prompt(51, 100)
    asking = Round([tokens], max_tokens=4, prompt_logprobs=0, reset_local=True)
    job = EngineJob(checkpoint("qwen3"), [asking], connector=ucm(kv_dir))
    first = engines.run(job).require_ok()
    job.rounds = [asking, Round([tokens], max_tokens=4, reset_local=True)]
    second = engines.run(job).require_ok()
    cold, warm = first.outputs[0][0], second.outputs[0][0]
    assert cold.prompt_logprobs is not None
    assert len(cold.prompt_logprobs) == len(tokens)
    assert None not in cold.prompt_logprobs[1:]
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert second.external_hits(0) == 0
    assert second.external_hits(1) == BLOCK, "the asking request was saved"
    assert warm.tokens == cold.tokens == second.outputs[1][0].tokens


def test_cache_salts_separate_tenants(engines: EnginePool, kv_dir: Path) -> None:
    """B04: KV saved under one salt is found under that salt only."""
    salted = [
        Round([CORPUS[0]], max_tokens=ANSWER, cache_salt=salt, reset_local=True)
        for salt in ("tenant-a", "tenant-b", None)
    ]
    job = corpus_job(connector=ucm(kv_dir), rounds=salted[:1])
    assert engines.run(job).require_ok().external_hits() == 0
    job.rounds = [*salted[1:], salted[0]]
    result = engines.run(job).require_ok()
    assert [result.external_hits(i) for i in range(3)] == [0, 0, PREFIX]


def test_two_engines_share_one_directory_at_the_same_time(
    engines: EnginePool, truth: Callable[[str], Truth], kv_dir: Path
) -> None:
    private = [prompt(seed, 150) for seed in (61, 62)]
    jobs = [
        corpus_job(connector=ucm(kv_dir), rounds=one_by_one([*CORPUS, mine])) for mine in private
    ]
    handles = [engines.start(job) for job in jobs]
    results = [handle.wait().require_ok() for handle in handles]
    for result in results:
        assert answers(result)[: len(CORPUS)] == truth("qwen3").cold
        assert result.prometheus.get(SAVE_FAILED, 0) == 0
    assert stray_files(kv_dir) == []
    whole = (PREFIX + TAIL_BLOCKS) // BLOCK + sum(150 // BLOCK for _ in private)
    assert len(objects(kv_dir)) == whole
    third = engines.run(
        corpus_job(connector=ucm(kv_dir), rounds=one_by_one([CORPUS[1], *private]))
    ).require_ok()
    assert [third.external_hits(i) for i in range(3)] == [PREFIX, 2 * BLOCK, 2 * BLOCK]


#: The corpus's tails and answers fill no further block.
TAIL_BLOCKS = 0


def test_what_a_killed_process_had_saved_is_found(
    engines: EnginePool, truth: Callable[[str], Truth], kv_dir: Path
) -> None:
    """A process that ends without any shutdown leaves whole blocks or none."""
    job = corpus_job(connector=ucm(kv_dir), scenario="engine_scenarios:die")
    assert engines.run(job).exit_code == 9
    assert stray_files(kv_dir) == []
    job.scenario = None
    after = engines.run(job).require_ok()
    assert answers(after) == truth("qwen3").cold
    assert after.external_hits(0) == PREFIX


def test_the_engine_is_left_clean(engines: EnginePool, filled: Path) -> None:
    """After hits and saves nothing is under way and vLLM has all its blocks back."""
    job = corpus_job(connector=ucm(filled), scenario="engine_scenarios:leftovers")
    job.rounds.append(Round([UNRELATED, SHARED], max_tokens=ANSWER))
    extra = engines.run(job).require_ok().extra
    assert extra["all_blocks_free"]
    assert not any(extra["scheduler"].values())
    assert not any(extra["worker"].values())


def test_external_hits_are_counted_once_by_vllm_and_by_ucm(
    engines: EnginePool, filled: Path
) -> None:
    """B41: what vLLM counts, what we promised and what was asked agree."""
    result = engines.run(corpus_job(connector=ucm(filled))).require_ok()
    total = len(CORPUS) * PREFIX
    assert result.metrics_by_round[-1][EXTERNAL_HITS] == total
    assert result.prometheus["ucm:ucm_hit_tokens_total"] == total
    assert result.prometheus["ucm:ucm_requests_total"] == len(CORPUS)
