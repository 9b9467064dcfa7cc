"""Runs one job with a real engine in the current process. The only file here that imports vLLM."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_harness.job import EngineJob, EngineResult, Output, Round

#: Small, quick, deterministic. A job overrides single values.
DEFAULT_ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}


def warm_up() -> None:
    """Import everything a job needs."""
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401


def resolve(target: str) -> Callable[..., Any]:
    """``module:function`` -> the function."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def scheduler_connector(llm: Any) -> Any:
    """The scheduler-side connector of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def worker_connector() -> Any:
    """The worker-side connector of an in-process engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def registry_samples() -> dict[str, float]:
    """All samples of this process's Prometheus registry, summed over labels."""
    from prometheus_client import REGISTRY

    sums: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if not sample.name.endswith(("_created", "_bucket")):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters and gauges under vLLM's names, and ours, summed over labels."""
    sums = {name: v for name, v in registry_samples().items() if name.startswith("ucm:")}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            sums[metric.name] = sums.get(metric.name, 0.0) + metric.value
    return sums


def _logprob_of_prompt(output: Any) -> list[float | None] | None:
    if output.prompt_logprobs is None:
        return None
    rows: list[float | None] = []
    for token, row in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
        rows.append(None if row is None else row[token].logprob)
    return rows


def _adapter(spec: Round) -> Any:
    if spec.lora is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(**spec.lora)


def run_round(llm: Any, spec: Round) -> list[Output]:
    """Send the prompts of one round and collect what came back, in the order of the prompts."""
    from vllm import SamplingParams

    if spec.before:
        resolve(spec.before)(llm, **spec.before_args)
    if spec.reset_local and not llm.reset_prefix_cache():
        # An idle engine does not collect finished saves, so their blocks are still held.
        resolve("engine_scenarios:settle")(llm)
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache: blocks are still in use")
    params = SamplingParams(
        max_tokens=spec.max_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=spec.prompt_logprobs,
    )
    requests: list[dict[str, Any]] = [{"prompt_token_ids": tokens} for tokens in spec.prompts]
    if spec.cache_salt is not None:
        requests = [{**r, "cache_salt": spec.cache_salt} for r in requests]
    batches = [requests] if spec.together else [[r] for r in requests]
    outputs: list[Output] = []
    for batch in batches:
        for out in llm.generate(batch, params, use_tqdm=False, lora_request=_adapter(spec)):
            outputs.append(
                Output(
                    tokens=list(out.outputs[0].token_ids),
                    cached=out.num_cached_tokens or 0,
                    finish_reason=out.outputs[0].finish_reason,
                    ttft_s=out.metrics.first_token_latency if out.metrics else 0.0,
                    prompt_logprobs=_logprob_of_prompt(out),
                )
            )
    return outputs


def _run(job: EngineJob, result: EngineResult) -> None:
    if job.setup:
        resolve(job.setup)()
    if not job.model:
        result.extra = resolve(job.scenario or "")(None, **job.scenario_args)
        return
    from vllm import LLM

    arguments: dict[str, Any] = {**DEFAULT_ENGINE, **job.engine, "model": job.model}
    if job.connector is not None:
        arguments["kv_transfer_config"] = job.connector
    started = time.monotonic()
    llm = LLM(**{k: v for k, v in arguments.items() if v is not None})
    result.init_s = time.monotonic() - started
    for spec in job.rounds:
        result.outputs.append(run_round(llm, spec))
        result.metrics_by_round.append(counters(llm))
    if job.scenario:
        result.extra = resolve(job.scenario)(llm, **job.scenario_args)
    if job.shutdown:
        llm.llm_engine.engine_core.shutdown()
    result.prometheus = registry_samples()


def run_job(job: EngineJob) -> EngineResult:
    """Build the engine, run every round, shut it down. A failure is told in ``error``."""
    result = EngineResult(pid=os.getpid())
    try:
        _run(job, result)
    except BaseException as error:
        traceback.print_exc()
        result.error = f"{type(error).__name__}: {error}"
    gc.collect()
    return result


def write_result(result: EngineResult, path: Path) -> None:
    """Publish the result whole, so that a killed process leaves none."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(result)))
    draft.rename(path)


def main(arguments: list[str]) -> int:
    """``python -m engine_harness.engine JOB.json RESULT.json``: one job in a fresh interpreter."""
    job = EngineJob.from_json(json.loads(Path(arguments[0]).read_text()))
    os.environ.update(job.env)
    result = run_job(job)
    write_result(result, Path(arguments[1]))
    return 1 if result.error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
