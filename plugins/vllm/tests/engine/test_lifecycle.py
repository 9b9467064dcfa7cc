"""Aborts and preemptions in every state: no crash, no stuck request, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine_cases import CORPUS, SAVE_FAILED, UNRELATED, Truth, checkpoint, corpus_job, ucm
from engine_harness import EngineJob, EnginePool, Round, prompt
from engine_harness.job import PREEMPTIONS

#: Six requests that need more blocks than the engine has: 6 x (200 + 120) tokens in 33 blocks of 32.
CROWD = [prompt(seed, 200) for seed in range(81, 87)]
NARROW = {"num_gpu_blocks_override": 34}


def test_preempted_requests_come_back_with_the_right_tokens(
    engines: EnginePool, kv_dir: Path
) -> None:
    """B14: a preempted request's open save and its later load never run against each other."""
    job = EngineJob(checkpoint("qwen3"), [Round(CROWD, max_tokens=120)], timeout_s=120.0)
    plain = engines.run(job).require_ok()
    assert plain.metric(PREEMPTIONS) == 0
    job.engine = dict(NARROW)
    job.scenario = "engine_scenarios:leftovers"
    job.connector = ucm(kv_dir)
    for process in ("cold", "warm"):
        crowded = engines.run(job).require_ok()
        assert crowded.metric(PREEMPTIONS) > 0, process
        assert crowded.tokens(0) == plain.tokens(0), process
        assert crowded.extra["all_blocks_free"], process
        assert not any(crowded.extra["scheduler"].values()), process
        assert not any(crowded.extra["worker"].values()), process
        assert crowded.prometheus.get("ucm:ucm_anomalies_total", 0) == 0, process
    assert crowded.external_hits() > 0


def test_preemption_while_saves_are_slow(engines: EnginePool, kv_dir: Path) -> None:
    """B07: blocks that a slow save still reads are not overwritten, or the save is given up."""
    job = EngineJob(checkpoint("qwen3"), [Round(CROWD, max_tokens=120)], timeout_s=120.0)
    plain = engines.run(job).require_ok()
    slow = Round(CROWD, max_tokens=120, before="engine_scenarios:make_dumps_slow")
    job = EngineJob(job.model, [slow], connector=ucm(kv_dir), engine=dict(NARROW), timeout_s=120.0)
    crowded = engines.run(job).require_ok()
    assert crowded.metric(PREEMPTIONS) > 0
    assert crowded.prometheus["ucm:ucm_preempt_wait_seconds_total"] > 0, "no save was met under way"
    assert crowded.tokens(0) == plain.tokens(0)
    # Whatever was stored must be right: a wide engine that loads it answers the same.
    reader = EngineJob(job.model, [Round(CROWD, max_tokens=120)], connector=ucm(kv_dir))
    read = engines.run(reader).require_ok()
    assert read.tokens(0) == plain.tokens(0)
    assert read.external_hits() > 0


def test_abort_in_every_state(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    """B15: never scheduled, looked up, loading, saving, computing, finished; late results after."""
    plain = EngineJob(
        checkpoint("qwen3"), [Round([CORPUS[0], UNRELATED], max_tokens=8, together=True)]
    )
    expected = engines.run(plain).require_ok().tokens()
    job = EngineJob(
        checkpoint("qwen3"),
        connector=ucm(filled),
        scenario="engine_scenarios:abort_in_every_state",
        scenario_args={"stored": CORPUS[0], "fresh": UNRELATED},
        timeout_s=120.0,
    )
    result = engines.run(job).require_ok()
    extra = result.extra
    assert extra["load_seen"] == 1, "the abort must have met a load under way"
    assert extra["save_seen"] >= 1, "the abort must have met a save under way"
    assert not any(extra["scheduler"].values()), extra
    assert not any(extra["worker"].values()), extra
    assert extra["all_blocks_free"]
    assert extra["answers"] == expected
    assert expected[0] == truth("qwen3").cold[0][:8]
    assert result.prometheus.get(SAVE_FAILED, 0) == 0
    assert result.prometheus.get("ucm:ucm_anomalies_total", 0) == 0


def test_requests_finish_while_their_saves_are_slow(
    engines: EnginePool, kv_dir: Path, truth: Callable[[str], Truth]
) -> None:
    """Delayed free: vLLM keeps the blocks until they are copied; shutdown finishes what was copied."""
    rounds = [Round(CORPUS, max_tokens=12, before="engine_scenarios:make_dumps_slow")]
    job = corpus_job(connector=ucm(kv_dir), rounds=rounds, scenario="engine_scenarios:leftovers")
    slow = engines.run(job).require_ok()
    assert slow.tokens(0) == truth("qwen3").cold
    assert slow.extra["all_blocks_free"]
    after = engines.run(corpus_job(connector=ucm(kv_dir))).require_ok()
    assert after.external_hits(0) > 0
