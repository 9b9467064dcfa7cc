"""Recurrent states beside attention on the real engine: Mamba2 in fp32, and the gated delta rule in bf16.

vLLM makes blocks of a hundred tokens and more for these models, and keeps a state at the end of a chunk
that ends on such a block: those are the boundaries at which a second process can hit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_cases import ANSWER, BLOCK, LOAD_FAILED, SAVE_FAILED, answers, checkpoint, ucm
from engine_harness import EngineJob, EnginePool, EngineResult, Round, prompt
from engine_harness.tamper import objects


@dataclass(frozen=True)
class Case:
    """``block``: of vLLM, and the distance of boundaries. ``length``: of the prompt. ``saves``: the
    use_layerwise of the process that saves."""

    model: str
    block: int
    length: int
    engine: dict[str, Any]
    saves: str = "auto"

    @property
    def tokens(self) -> list[int]:
        return prompt(71, self.length)

    @property
    def boundary(self) -> int:
        """The last one that leaves a token to compute."""
        return (self.length - 1) // self.block * self.block


def _engine(block: int, **more: Any) -> dict[str, Any]:
    """vLLM chooses the block; a state is kept at the end of each."""
    steps = {"max_num_batched_tokens": block, "prefix_cache_retention_interval": block}
    return {"block_size": None, **steps, **more}


MAMBA2 = Case("granite_hybrid", 128, 300, _engine(128), saves="save")
DELTA = Case("qwen3_next", 640, 1400, _engine(640, max_model_len=2048, dtype="bfloat16"))
BESIDE = Case("falcon_h1", 128, 300, _engine(128), saves="save")
APART = Case("nemotron_h", 128, 300, _engine(128))
CASES = [
    pytest.param(MAMBA2, id="mamba2"),
    pytest.param(BESIDE, id="mamba2-beside-attention"),
    pytest.param(APART, id="mamba2-layers-of-one-thing"),
    pytest.param(DELTA, id="delta-rule"),
]


def _job(case: Case, rounds: list[Round] | None = None, **changes: Any) -> EngineJob:
    once = [Round([case.tokens], max_tokens=ANSWER)]
    job = EngineJob(checkpoint(case.model), rounds or once, engine=dict(case.engine))
    for name, value in changes.items():
        setattr(job, name, value)
    return job


@dataclass(frozen=True)
class Filled:
    """What one process saved, and its two answers: computed, and from vLLM's own cache."""

    directory: Path
    run: EngineResult


@pytest.fixture(scope="session")
def filled_by(
    engines: EnginePool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Filled]:
    known: dict[str, Filled] = {}

    def of(case: Case) -> Filled:
        if case.model not in known:
            directory = tmp_path_factory.mktemp(f"hybrid-{case.model}")
            twice = [Round([case.tokens], max_tokens=ANSWER) for _ in range(2)]
            job = _job(case, twice, connector=ucm(directory, use_layerwise=case.saves))
            job.scenario = "engine_scenarios:leftovers"  # every save has ended
            known[case.model] = Filled(directory, engines.run(job).require_ok())
        return known[case.model]

    return of


@pytest.mark.parametrize("case", CASES)
def test_second_process_hits_at_the_boundary(
    case: Case, engines: EnginePool, filled_by: Callable[[Case], Filled]
) -> None:
    """The same tokens as vLLM's own cache gives at the same split, whichever way the first one saved."""
    filled = filled_by(case)
    assert ("saves layer by layer" in filled.run.log) == (case.saves == "save")
    assert filled.run.prometheus.get(SAVE_FAILED, 0) == 0
    assert filled.run.local_hits(1) == case.boundary
    assert filled.run.extra["all_blocks_free"]
    boundaries = case.boundary // case.block
    # Every whole block of KV, and at each boundary one object with the states of all layers.
    blocks = (case.length + ANSWER - 1) // BLOCK
    assert len(objects(filled.directory)) == blocks + boundaries
    job = _job(case, connector=ucm(filled.directory), scenario="engine_scenarios:leftovers")
    second = engines.run(job).require_ok()
    assert second.external_hits() == case.boundary > 0
    assert second.local_hits() == 0
    assert second.tokens() == filled.run.tokens(1)
    assert second.prometheus.get(LOAD_FAILED, 0) == 0
    assert second.extra["all_blocks_free"]


def test_fp32_answers_are_those_of_a_run_without_cache(
    engines: EnginePool, filled_by: Callable[[Case], Filled]
) -> None:
    plain = engines.run(_job(MAMBA2)).require_ok()
    assert answers(filled_by(MAMBA2).run) == 2 * answers(plain)


@pytest.mark.parametrize("kind", ["flip_byte", "delete"])
@pytest.mark.parametrize("what", ["state", "kv"])
def test_one_group_loses_its_deepest_object(
    what: str, kind: str, engines: EnginePool, filled_by: Callable[[Case], Filled], tmp_path: Path
) -> None:
    """Gone: a hit one boundary earlier. Corrupt: promised once, then from a boundary valid in all groups;
    and what was damaged is stored anew."""
    case, filled = MAMBA2, filled_by(MAMBA2)
    directory = tmp_path / "kv"
    shutil.copytree(filled.directory, directory)
    arguments = {"root": str(directory), "tokens": case.tokens, "what": what, "kind": kind}
    hook = "engine_scenarios:damage_at_boundary"
    arguments["position"] = case.boundary
    rounds = [
        Round([case.tokens], max_tokens=ANSWER, before=hook, before_args=arguments),
        Round([case.tokens], max_tokens=ANSWER, reset_local=True),
    ]
    result = engines.run(_job(case, rounds, connector=ucm(directory))).require_ok()
    assert answers(result) == answers(filled.run)
    earlier = case.boundary - case.block
    corrupt = kind == "flip_byte"
    assert result.external_hits(0) == (case.boundary + earlier if corrupt else earlier)
    assert result.metric(LOAD_FAILED, 0) == (1 if corrupt else 0)
    assert result.external_hits(1) == case.boundary, "it was not stored anew"


def test_the_state_decides_the_answer(
    engines: EnginePool, filled_by: Callable[[Case], Filled], tmp_path: Path
) -> None:
    """The control of these tests: with checksums off a wrong state is believed, and shows in the tokens."""
    case, filled = MAMBA2, filled_by(MAMBA2)
    directory = tmp_path / "kv"
    shutil.copytree(filled.directory, directory)
    arguments: dict[str, Any] = {"root": str(directory), "tokens": case.tokens, "what": "state"}
    arguments |= {"position": case.boundary, "kind": "negate_floats"}
    hook = "engine_scenarios:damage_at_boundary"
    rounds = [Round([case.tokens], max_tokens=ANSWER, before=hook, before_args=arguments)]
    connector = ucm(directory, {"posix_verify_checksums": False})
    result = engines.run(_job(case, rounds, connector=connector)).require_ok()
    assert result.external_hits() == case.boundary
    assert result.tokens() != filled.run.tokens(1)


def test_the_default_retention_is_warned_about(engines: EnginePool, kv_dir: Path) -> None:
    """vLLM keeps the state at a prompt's last boundary alone then."""
    case = MAMBA2
    job = _job(case, connector=ucm(kv_dir))
    del job.engine["prefix_cache_retention_interval"]
    result = engines.run(job).require_ok()
    assert "prefix_cache_retention_interval is 0" in result.log
    assert "--prefix-cache-retention-interval" in result.log


#: Two workers, each on a core of its own.
WORKERS = [
    pytest.param(MAMBA2, {"tensor_parallel_size": 2}, id="a-part-of-every-state"),
    pytest.param(
        BESIDE,
        {
            "pipeline_parallel_size": 2,
            "enforce_eager": False,
            "compilation_config": {"mode": 2, "backend": "eager"},
        },
        id="states-of-some-layers",
    ),
]


@pytest.mark.parametrize(("case", "workers"), WORKERS)
def test_two_workers(
    case: Case,
    workers: dict[str, Any],
    engines: EnginePool,
    filled_by: Callable[[Case], Filled],
    kv_dir: Path,
) -> None:
    """What one worker alone lacks is no hit; else the second answer is the first, which was computed."""
    rounds = [Round([case.tokens], max_tokens=ANSWER, reset_local=True) for _ in range(3)]
    rounds[2].before = "engine_scenarios:damage_at_boundary"
    rounds[2].before_args = {"root": str(kv_dir), "tokens": case.tokens, "what": "state"}
    rounds[2].before_args |= {"position": case.boundary, "kind": "delete", "parts": 1}
    job = _job(case, rounds, connector=ucm(kv_dir, use_layerwise="save"), timeout_s=180.0)
    job.engine |= workers
    job.env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    result = engines.run(job).require_ok()
    assert [result.external_hits(i) for i in range(3)] == [0, case.boundary, 128]
    assert answers(result) == 3 * answers(filled_by(case).run)[:1]
    assert result.prometheus.get(LOAD_FAILED, 0) == 0
