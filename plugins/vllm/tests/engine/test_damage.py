"""Stored bytes that are wrong, cut, gone or unwritable cost a recomputation: never a token, never a hang.

The negative control at the end proves that the tests can fail: with checksums off, wrong bytes do
change the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    Truth,
    answers,
    checkpoint,
    corpus_job,
    one_by_one,
    ucm,
)
from engine_harness import EngineJob, EnginePool, EngineResult, Round, prompt
from engine_harness.tamper import DAMAGES, damage, objects, stray_files


def _damaged_between(filled: Path, kind: str, count: int | None = None) -> EngineJob:
    """The corpus, where files are damaged after the first lookup and before its load."""
    arguments: dict[str, Any] = {"root": str(filled), "kind": kind, "count": count}
    hook = {"before": "engine_scenarios:damage_before_load", "before_args": arguments}
    return corpus_job(connector=ucm(filled), rounds=one_by_one(CORPUS, **hook), timeout_s=120.0)


def _visible(result: EngineResult) -> None:
    assert result.prometheus[LOAD_FAILED] > 0, "a failed load must be counted"
    assert "could not be loaded" in result.log, "a failed load must be logged"


def test_every_damage_between_lookup_and_load_is_recomputed_and_healed(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    """One process meets one kind after the other: each time it recomputes and stores the blocks anew."""
    rounds = [
        Round(
            [CORPUS[0]],
            max_tokens=ANSWER,
            reset_local=True,
            before="engine_scenarios:damage_before_load",
            before_args={"root": str(filled), "kind": kind},
        )
        for kind in sorted(DAMAGES)
    ]
    result = engines.run(corpus_job(connector=ucm(filled), rounds=rounds)).require_ok()
    for index, kind in enumerate(sorted(DAMAGES)):
        assert result.tokens(index) == [truth("qwen3").cold[0]], kind
        assert result.external_hits(index) == PREFIX, (
            f"{kind}: the blocks before it were not healed"
        )
        # Exchanging five files one after the other brings one of them back to its own name.
        intact = 1 if kind == "swap_with_next" else 0
        assert result.metric(LOAD_FAILED, index) == PREFIX // BLOCK - intact, kind
    _visible(result)
    healthy = engines.run(corpus_job(connector=ucm(filled))).require_ok()
    assert answers(healthy) == truth("qwen3").cold
    assert healthy.external_hits(0) == PREFIX
    assert healthy.prometheus.get(LOAD_FAILED, 0) == 0


def test_one_damaged_block_of_five_costs_no_more_than_its_tail(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    result = engines.run(_damaged_between(filled, "flip_byte", 1)).require_ok()
    assert answers(result) == truth("qwen3").cold
    assert result.prometheus[LOAD_FAILED] == 1
    assert result.prometheus[LOADED] >= PREFIX // BLOCK - 1


@pytest.mark.parametrize("kind", ["flip_byte", "truncate", "delete", "swap_with_next"])
def test_damage_before_the_process_starts(
    kind: str, engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    assert damage(filled, kind) == PREFIX // BLOCK
    result = engines.run(corpus_job(connector=ucm(filled))).require_ok()
    assert answers(result) == truth("qwen3").cold
    if kind == "delete":  # nothing was promised, so nothing failed
        assert result.external_hits(0) == 0
        assert result.prometheus.get(LOAD_FAILED, 0) == 0
    assert result.external_hits(2) == PREFIX, "the first prompt stored its blocks anew"


def test_a_failed_load_under_vllms_default_policy_fails_that_request_only(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    job = _damaged_between(filled, "flip_byte")
    job.connector = ucm(filled, policy="fail")
    result = engines.run(job).require_ok()
    assert [outputs[0].finish_reason for outputs in result.outputs] == ["error", "length", "length"]
    assert answers(result)[1:] == truth("qwen3").cold[1:]
    _visible(result)


def test_a_whole_directory_that_vanishes_while_serving(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    """B31: later dumps make the directories again."""
    hook = {"before": "engine_scenarios:remove_objects", "before_args": {"root": str(filled)}}
    rounds = [*one_by_one(CORPUS[:1]), *one_by_one(CORPUS, **hook)]
    result = engines.run(corpus_job(connector=ucm(filled), rounds=rounds)).require_ok()
    assert answers(result) == [truth("qwen3").cold[0], *truth("qwen3").cold]
    assert [result.external_hits(i) for i in range(4)] == [PREFIX, 0, PREFIX, PREFIX]


def test_b56_storage_that_is_lost_costs_hits_and_nothing_waits_for_it(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    """The health wrapper takes it out on both sides, so that no load is even tried, and puts it back."""
    health = {"interval_ms": 50, "timeout_ms": 5_000, "window": 4}
    where = {"root": str(filled)}
    rounds = [
        *one_by_one(CORPUS[:1]),
        *one_by_one(CORPUS[1:2], before="engine_scenarios:lose_directory", before_args=where),
        *one_by_one(CORPUS[2:3], before="engine_scenarios:find_directory", before_args=where),
    ]
    connector = ucm(filled, store={"store_health": health})
    result = engines.run(corpus_job(connector=connector, rounds=rounds)).require_ok()
    assert answers(result) == truth("qwen3").cold
    assert [result.external_hits(i) for i in range(3)] == [PREFIX, 0, PREFIX]
    assert result.prometheus.get(LOAD_FAILED, 0) == 0
    assert result.prometheus[SAVE_FAILED] > 0, "what was not stored is counted"
    for name in ("outages", "recoveries"):
        assert result.prometheus[f"ucm:ucm_stage_{name}_total"] == 1


def test_a_full_disk_loses_blocks_and_nothing_else(engines: EnginePool, small_disk: Path) -> None:
    prompts = [prompt(seed, 500) for seed in (71, 72, 73, 74)]
    job = EngineJob(checkpoint("qwen3"), one_by_one(prompts), timeout_s=120.0)
    plain = engines.run(job).require_ok()
    job.connector = ucm(small_disk)
    job.scenario = "engine_scenarios:leftovers"
    full = engines.run(job).require_ok()
    assert answers(full) == answers(plain)
    assert full.prometheus[SAVE_FAILED] > 0, "a block that was not stored must be counted"
    assert "No space left" in full.log or "ENOSPC" in full.log
    assert stray_files(small_disk) == [], "nothing half-written stays"
    stored = len(objects(small_disk))
    assert 0 < stored < len(prompts) * 7
    again = engines.run(job).require_ok()
    assert answers(again) == answers(plain)
    assert again.external_hits(0) > 0


def test_a_directory_that_becomes_unwritable_while_serving(
    engines: EnginePool, small_disk: Path, truth: Callable[[str], Truth]
) -> None:
    """Loads go on, saves fail visibly. (A read-only mount: root ignores permission bits.)"""
    first = engines.run(corpus_job(connector=ucm(small_disk), rounds=one_by_one(CORPUS[:1])))
    assert first.require_ok().prometheus.get(SAVE_FAILED, 0) == 0
    hook = {
        "before": "engine_scenarios:remount_read_only",
        "before_args": {"root": str(small_disk)},
    }
    fresh = prompt(75, 200)
    rounds = [*one_by_one(CORPUS[:1]), *one_by_one([fresh, CORPUS[1]], **hook)]
    job = corpus_job(connector=ucm(small_disk), rounds=rounds)
    job.scenario = "engine_scenarios:leftovers"  # a failed write is told after its retries
    result = engines.run(job).require_ok()
    assert answers(result)[0] == truth("qwen3").cold[0]
    assert answers(result)[2] == truth("qwen3").cold[1]
    assert result.external_hits(2) == PREFIX
    assert result.prometheus[SAVE_FAILED] >= 200 // BLOCK
    assert "Read-only file system" in result.log or "EROFS" in result.log


def test_negative_control_without_checksums_wrong_bytes_change_the_answers(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    damage(filled, "negate_floats")
    blind = ucm(filled, store={"posix_verify_checksums": False})
    result = engines.run(corpus_job(connector=blind)).require_ok()
    assert result.external_hits(0) == PREFIX
    assert result.prometheus.get(LOAD_FAILED, 0) == 0
    for got, right in zip(answers(result), truth("qwen3").cold, strict=True):
        assert got != right


def test_negative_control_intact_bytes_without_checksums_are_right(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    blind = ucm(filled, store={"posix_verify_checksums": False})
    result = engines.run(corpus_job(connector=blind)).require_ok()
    assert answers(result) == truth("qwen3").cold
    assert result.external_hits(0) == PREFIX


def test_the_corpus_is_what_these_tests_assume() -> None:
    assert len(SHARED) == PREFIX
    assert PREFIX % BLOCK == 0
    assert all(len(p) + ANSWER < PREFIX + BLOCK for p in CORPUS)
    assert isinstance(Round(CORPUS), Round)
