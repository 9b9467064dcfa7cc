"""The harness itself: a hung, dying or failing engine must end as a failure, soon and with its log."""

from __future__ import annotations

import json
import time

from engine_cases import UNRELATED, checkpoint
from engine_harness import EngineJob, EnginePool, Round
from engine_harness.client import processes_of_session


def _job(**changes: object) -> EngineJob:
    job = EngineJob(checkpoint("qwen3"), [Round([UNRELATED[:40]], max_tokens=2)])
    for name, value in changes.items():
        setattr(job, name, value)
    return job


def test_a_hung_engine_is_killed_at_its_deadline_with_its_stacks(engines: EnginePool) -> None:
    started = time.monotonic()
    result = engines.run(EngineJob("", scenario="engine_scenarios:hang", timeout_s=5.0))
    assert result.timed_out
    assert not result.ok
    assert time.monotonic() - started < 90
    assert "in hang" in result.log  # the stack of the thread that hung
    assert processes_of_session(result.pid) == []


def test_a_dying_engine_is_told_by_its_exit_code(engines: EnginePool) -> None:
    result = engines.run(_job(scenario="engine_scenarios:die"))
    assert (result.exit_code, result.outputs) == (9, [])
    assert not result.ok


def test_a_failing_engine_brings_its_error_and_log(engines: EnginePool) -> None:
    result = engines.run(_job(engine={"max_model_len": 10_000_000}))
    assert result.exit_code == 1
    assert "max_model_len" in result.error
    assert "Traceback" in result.log


def test_two_engines_run_at_once_and_jobs_survive_json(engines: EnginePool) -> None:
    job = _job()
    assert EngineJob.from_json(json.loads(json.dumps(job.to_json()))) == job
    handles = [engines.start(job), engines.start(job)]
    first, second = [handle.wait().require_ok() for handle in handles]
    assert first.pid != second.pid
    assert first.tokens() == second.tokens()
