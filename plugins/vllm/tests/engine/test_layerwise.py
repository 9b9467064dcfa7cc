"""Loads overlapped with compute and saves layer by layer, on the real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_cases import (
    ANSWER,
    BLOCK,
    CORPUS,
    LOAD_FAILED,
    LOADED,
    PREFIX,
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
from engine_harness.tamper import objects

TP2: dict[str, Any] = {"tensor_parallel_size": 2, "enable_prefix_caching": False}
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def _layerwise(directory: Path, choice: Any = True, **options: Any) -> dict[str, Any]:
    return ucm(directory, use_layerwise=choice, **options)


def test_second_process_loads_and_saves_layer_by_layer(
    engines: EnginePool, saved: Callable[[str], Saved], truth: Callable[[str], Truth], kv_dir: Path
) -> None:
    store = {"store_pipeline": "Cache|Posix", "cache_buffer_capacity_gb": "128 MiB"}
    job = corpus_job(connector=_layerwise(kv_dir, store=store))
    job.scenario = "engine_scenarios:leftovers"
    first = engines.run(job).require_ok()
    assert answers(first) == truth("qwen3").cold
    bulk = saved("qwen3").directory
    assert [p.name for p in objects(kv_dir)] == [p.name for p in objects(bulk)]
    second = engines.run(job).require_ok()
    assert answers(second) == truth("qwen3").cold
    for index in range(len(CORPUS)):
        assert second.external_hits(index) == PREFIX
    assert second.prometheus[LOADED] == len(CORPUS) * PREFIX // BLOCK
    for run in (first, second):
        assert not any(run.extra["scheduler"].values())
        assert not any(run.extra["worker"].values())
        assert run.extra["all_blocks_free"]


def test_groups_are_saved_layer_by_layer(
    engines: EnginePool, kv_dir: Path, truth: Callable[[str], Truth]
) -> None:
    job = corpus_job("gemma3", connector=_layerwise(kv_dir, "save"))
    for hit in (0, PREFIX):
        result = engines.run(job).require_ok()
        assert answers(result) == truth("gemma3").cold
        assert result.external_hits(0) == hit


def test_several_groups_are_refused_with_the_reason(engines: EnginePool, kv_dir: Path) -> None:
    refused = engines.run(corpus_job("gemma3", connector=_layerwise(kv_dir)))
    assert not refused.ok
    for words in ("use_layerwise is not possible here", "3 KV cache groups"):
        assert words in refused.error + refused.log


def test_a_corrupt_block_is_recomputed_and_what_was_computed_on_it_is_not_kept(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    """The prompt goes on for more blocks in the very step that loads the corrupt one."""
    longer = SHARED + prompt(91, 200)
    plain = EngineJob(checkpoint("qwen3"), [Round([longer], max_tokens=ANSWER)])
    wanted = answers(engines.run(plain).require_ok())
    hook = {
        "before": "engine_scenarios:damage_blocks",
        "before_args": {
            "root": str(filled),
            "tokens": SHARED,
            "window": None,
            "blocks": [3],
            "kind": "negate_floats",
        },
    }
    job = corpus_job(connector=_layerwise(filled))
    job.rounds = one_by_one([longer], **hook)
    job.scenario = "engine_scenarios:leftovers"
    hurt = engines.run(job).require_ok()
    assert answers(hurt) == wanted
    assert hurt.prometheus[LOAD_FAILED] == 1
    assert hurt.extra["all_blocks_free"]
    third = engines.run(corpus_job(connector=ucm(filled), rounds=one_by_one([longer])))
    assert answers(third.require_ok()) == wanted
    assert third.external_hits() == len(longer) // BLOCK * BLOCK
    assert third.prometheus.get(LOAD_FAILED, 0) == 0


def test_two_ranks_and_only_the_second_ones_file_is_corrupt(
    engines: EnginePool, kv_dir: Path
) -> None:
    """What both ranks computed on it is dropped on both: a third process gets right tokens.

    Two slices of heads are the same files for one rank as for two, so only the middle process needs two.
    """
    longer = SHARED + prompt(92, 200)
    alone = EngineJob(checkpoint("qwen3"), [Round([longer], max_tokens=ANSWER)])
    wanted = answers(engines.run(alone).require_ok())
    both = {"namespace": "both", "head_slices": 2}
    first = corpus_job(connector=ucm(kv_dir, **both), rounds=one_by_one([[*SHARED, 5]]))
    first.scenario = "engine_scenarios:damage_second_slice"
    first.scenario_args = {"root": str(kv_dir), "tokens": SHARED, "block": 3}
    engines.run(first).require_ok()
    assert len(objects(kv_dir)) == 2 * PREFIX // BLOCK

    job = EngineJob(checkpoint("qwen3"), [Round([longer], max_tokens=ANSWER)], timeout_s=180.0)
    job.engine, job.env = dict(TP2), dict(ONE_CORE_EACH)
    job.connector = _layerwise(kv_dir, **both)
    hurt = engines.run(job).require_ok()
    assert answers(hurt) == wanted
    assert hurt.prometheus[LOAD_FAILED] == 1
    third = engines.run(corpus_job(connector=ucm(kv_dir, **both), rounds=one_by_one([longer])))
    assert answers(third.require_ok()) == wanted
    assert third.external_hits() == len(longer) // BLOCK * BLOCK
    assert third.prometheus.get(LOAD_FAILED, 0) == 0
