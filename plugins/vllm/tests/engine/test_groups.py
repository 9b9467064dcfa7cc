"""Sliding windows beside full attention on the real engine: gemma3 (two sliding groups, one store
group) and gpt-oss. Every prompt is longer than the window of 128 tokens, and computed in fp32."""

from __future__ import annotations

import shutil
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
    SHARED,
    Saved,
    Truth,
    answers,
    checkpoint,
    corpus_job,
    one_by_one,
    ucm,
)
from engine_harness import EngineJob, EnginePool, Round, prompt
from engine_harness.tamper import objects, stray_files

MODELS = ["gemma3", "gpt_oss"]
WINDOW = 128


@pytest.mark.parametrize("model", MODELS)
def test_second_process_hits_with_the_tokens_of_a_run_without_cache(
    model: str, engines: EnginePool, saved: Callable[[str], Saved], truth: Callable[[str], Truth]
) -> None:
    store = saved(model)
    assert answers(store.run) == truth(model).cold, "saving changed what the engine answers"
    assert store.run.prometheus.get(SAVE_FAILED, 0) == 0
    assert len(objects(store.directory)) == 2 * PREFIX // BLOCK
    assert stray_files(store.directory) == []
    second = engines.run(corpus_job(model, connector=ucm(store.directory))).require_ok()
    for index in range(len(CORPUS)):
        assert second.external_hits(index) == PREFIX
        assert second.local_hits(index) == 0
    assert answers(second) == truth(model).cold
    # All blocks of the full row, and of the windowed one those that cover the last 128 tokens.
    assert second.prometheus[LOADED] == len(CORPUS) * (PREFIX + WINDOW) // BLOCK
    assert second.prometheus.get(LOAD_FAILED, 0) == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_long_prompt_in_chunks(model: str, engines: EnginePool, kv_dir: Path) -> None:
    """vLLM takes window blocks back while the prompt runs; every one of them has been copied."""
    long = prompt(81, 900)
    job = EngineJob(checkpoint(model), [Round([long], max_tokens=ANSWER)])
    job.engine = {"max_num_batched_tokens": 192, "enable_chunked_prefill": True}
    plain = answers(engines.run(job).require_ok())
    job.connector = ucm(kv_dir)
    job.scenario = "engine_scenarios:leftovers"
    job.rounds[0].before = "engine_scenarios:make_dumps_slow"  # copies outlive the step
    first = engines.run(job).require_ok()
    assert first.extra["all_blocks_free"]
    assert first.prometheus["ucm:ucm_preempt_wait_seconds_total"] > 0, "no window was waited for"
    assert len(objects(kv_dir)) == 2 * (900 // BLOCK)
    # Another tail: the hit ends inside the first prompt, at a boundary that no chunk ended at.
    job.rounds = [Round([long], max_tokens=ANSWER), Round([[*long[:400], 5]], max_tokens=1)]
    job.rounds[1].reset_local = True
    second = engines.run(job).require_ok()
    assert answers(first) == answers(second)[:1] == plain
    assert second.external_hits(0) == 896
    assert second.external_hits(1) == 384


def _meddled(directory: Path, window: int | None, blocks: list[int], kind: str) -> Round:
    """The first prompt of the corpus, after files of one store group were damaged."""
    arguments = {
        "root": str(directory),
        "tokens": SHARED,
        "window": window,
        "blocks": blocks,
        "kind": kind,
    }
    (asked,) = one_by_one(
        CORPUS[:1], before="engine_scenarios:damage_blocks", before_args=arguments
    )
    return asked


@pytest.mark.parametrize("model", MODELS)
def test_one_group_loses_files(
    model: str,
    engines: EnginePool,
    saved: Callable[[str], Saved],
    truth: Callable[[str], Truth],
    tmp_path: Path,
) -> None:
    """Evicted: a smaller hit, at a boundary that all groups reach. Corrupt: right tokens, healed."""
    directory = tmp_path / "kv"
    shutil.copytree(saved(model).directory, directory)
    cases: list[tuple[int | None, list[int], str, int, int]] = [
        (WINDOW, [4], "delete", PREFIX - BLOCK, 0),
        (None, [2], "delete", 2 * BLOCK, 0),
        # Promised once, and once more without the bad block: 320, then 256 or 128 tokens.
        (WINDOW, [4], "flip_byte", PREFIX + PREFIX - BLOCK, 1),
        (None, [2], "flip_byte", PREFIX + 2 * BLOCK, 1),
        (WINDOW, [0, 1, 2], "delete", PREFIX, 0),  # no window reaches them
    ]
    rounds = [_meddled(directory, *case[:3]) for case in cases]
    job = corpus_job(model, connector=ucm(directory), rounds=[*rounds, *one_by_one(CORPUS[:1])])
    result = engines.run(job).require_ok()
    for index, (window, blocks, kind, hit, failed) in enumerate(cases):
        what = f"{kind} of blocks {blocks} of window {window}"
        assert result.tokens(index) == [truth(model).cold[0]], what
        assert result.external_hits(index) == hit, what
        assert result.metric(LOAD_FAILED, index) == failed, what
    assert result.tokens() == [truth(model).cold[0]]
    assert result.external_hits() == PREFIX, "what was damaged was stored anew"


@pytest.mark.parametrize("window", [WINDOW, None])
def test_every_file_of_one_group_is_corrupt(
    window: int | None,
    engines: EnginePool,
    saved: Callable[[str], Saved],
    truth: Callable[[str], Truth],
    tmp_path: Path,
) -> None:
    directory = tmp_path / "kv"
    shutil.copytree(saved("gemma3").directory, directory)
    round_ = _meddled(directory, window, list(range(PREFIX // BLOCK)), "negate_floats")
    job = corpus_job("gemma3", connector=ucm(directory), rounds=[round_])
    job.scenario = "engine_scenarios:leftovers"
    result = engines.run(job).require_ok()
    assert result.tokens() == [truth("gemma3").cold[0]]
    assert result.metric(LOAD_FAILED) > 0
    assert not any(result.extra["scheduler"].values())
    assert not any(result.extra["worker"].values())
    assert result.extra["all_blocks_free"]


@pytest.mark.long
def test_two_pipeline_stages_hold_half_of_each_group(
    engines: EnginePool, kv_dir: Path, truth: Callable[[str], Truth]
) -> None:
    job = EngineJob(checkpoint("gemma3"), [Round(CORPUS[:1], max_tokens=ANSWER)])
    job.engine = {
        "pipeline_parallel_size": 2,
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    }
    job.env, job.timeout_s = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, 180.0
    job.connector = ucm(kv_dir)
    for hit in (0, PREFIX):
        result = engines.run(job).require_ok()
        assert answers(result) == truth("gemma3").cold[:1]
        assert result.external_hits() == hit
        assert len(objects(kv_dir)) == 4 * PREFIX // BLOCK, "two stages of two store groups"
