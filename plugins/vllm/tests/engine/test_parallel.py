"""Several workers on the real engine: tensor-parallel slices, pipeline stages, elected writers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_cases import (
    ANSWER,
    BLOCK,
    CORPUS,
    LOAD_FAILED,
    PREFIX,
    Truth,
    checkpoint,
    engine_of,
    ucm,
)
from engine_harness import EngineJob, EnginePool, Round, prompt
from engine_harness.tamper import objects

#: vLLM's own cache is off, so that only the connector can hit.
ONLY_US: dict[str, Any] = {"enable_prefix_caching": False}
TP2: dict[str, Any] = {**ONLY_US, "tensor_parallel_size": 2}
PP2: dict[str, Any] = {
    **ONLY_US,
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}
#: Each worker on a core of its own; a stage of one layer and a stage of three.
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
UNEVEN = {"VLLM_PP_LAYER_PARTITION": "1,3"}


def _job(
    prompts: list[list[int]], model: str = "qwen3", connector: Any = None, **changes: Any
) -> EngineJob:
    rounds = [Round([tokens], max_tokens=ANSWER) for tokens in prompts]
    job = EngineJob(checkpoint(model), rounds, connector=connector, name="parallel")
    job.timeout_s = 180.0
    for name, value in changes.items():
        setattr(job, name, value)
    job.engine = {**engine_of(model), **ONLY_US, **job.engine}
    return job


def _hits(result: Any) -> list[int]:
    assert result.prometheus.get(LOAD_FAILED, 0) == 0
    return [result.external_hits(i) for i in range(len(result.outputs))]


def _answers(result: Any) -> list[list[int]]:
    return [o.tokens for outputs in result.outputs for o in outputs]


def test_one_worker_saves_two_serve_and_back(
    engines: EnginePool, kv_dir: Path, truth: Callable[[str], Truth]
) -> None:
    """Head slices: a namespace of two slices is read and written by TP=1 and TP=2 alike."""
    shared = ucm(kv_dir, namespace="shared", head_slices=2)
    alone = engines.run(_job(CORPUS[:1], connector=shared)).require_ok()
    assert _hits(alone) == [0]
    blocks = len(CORPUS[0]) // BLOCK
    mine = set(objects(kv_dir))
    assert len(mine) == 2 * blocks, "one object per slice"

    other = prompt(71, 3 * BLOCK + 9)
    two = _job([CORPUS[0], other], connector=shared, engine=dict(TP2), env=dict(ONE_CORE_EACH))
    served = engines.run(two).require_ok()
    assert _hits(served) == [PREFIX, 0]
    assert _answers(served)[0] == truth("qwen3").cold[0]
    assert len(objects(kv_dir)) == 2 * (blocks + 3), "each rank wrote its own slice, once"

    # Every rank's answer counts: without one slice of a block there is no hit from it on.
    gone = next(path for path in objects(kv_dir) if path not in mine)
    gone.unlink()
    back = engines.run(_job([other, CORPUS[1]], connector=shared)).require_ok()
    assert _hits(back)[0] in (0, BLOCK, 2 * BLOCK)
    assert _hits(back)[1] == PREFIX
    assert _answers(back) == [_answers(served)[1], truth("qwen3").cold[1]]
    assert gone.exists(), "what was missing is saved again"


def test_a_failed_writer_is_replaced_and_tp_does_not_enter_the_ids(
    engines: EnginePool, kv_dir: Path
) -> None:
    """MLA: content equal on all ranks has one writer per block, and another when that one fails."""
    tokens = prompt(72, 5 * BLOCK + 9)
    mla = {"model": "deepseek_v3", "connector": ucm(kv_dir)}
    job = _job([tokens], engine={**TP2, **engine_of("deepseek_v3")}, env=dict(ONE_CORE_EACH), **mla)
    job.setup = "engine_scenarios:rank_one_cannot_save"
    broken = engines.run(job).require_ok()
    assert _hits(broken) == [0]
    assert len(objects(kv_dir)) == 5, "blocks of the failing rank were taken over"
    written = {path: path.stat().st_mtime_ns for path in objects(kv_dir)}

    served = engines.run(_job([tokens], **mla)).require_ok()
    assert _hits(served) == [5 * BLOCK]
    assert {path: path.stat().st_mtime_ns for path in objects(kv_dir)} == written


def test_uneven_stages_save_and_serve_and_all_of_them_are_asked(
    engines: EnginePool, kv_dir: Path, truth: Callable[[str], Truth]
) -> None:
    env = {**ONE_CORE_EACH, **UNEVEN}
    job = _job(CORPUS[:1], connector=ucm(kv_dir), engine=dict(PP2), env=env)
    first = engines.run(job).require_ok()
    assert _hits(first) == [0]
    assert _answers(first) == truth("qwen3").cold[:1]
    blocks = len(CORPUS[0]) // BLOCK
    sizes = sorted({path.stat().st_size for path in objects(kv_dir)})
    assert len(sizes) == 2, "one object per stage"
    last_stage = [path for path in objects(kv_dir) if path.stat().st_size == sizes[1]]
    assert len(last_stage) == blocks

    remove = "engine_scenarios:remove_largest_objects"
    job.rounds.append(Round(CORPUS[:1], max_tokens=ANSWER, before=remove))
    job.rounds[-1].before_args = {"root": str(kv_dir)}
    second = engines.run(job).require_ok()
    assert _hits(second) == [PREFIX, 0], "the first stage's answer alone is no hit"
    assert _answers(second) == truth("qwen3").cold[:1] * 2
    assert all(path.exists() for path in last_stage), "the missing stage was saved again"
