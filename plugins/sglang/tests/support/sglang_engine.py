"""Runs one job of the engine harness with a real SGLang engine. ``$UCM_HARNESS_ENGINE`` names this module.

``job.connector`` is our part of the storage backend's extra configuration (None: no hierarchical cache),
``reset_local`` empties device and host cache, so that only storage can hit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from engine_harness.engine import resolve
from engine_harness.job import EngineJob, EngineResult, Output, Round
from engine_harness.tamper import objects

#: Small, quick, deterministic. A job overrides single values.
DEFAULT_ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "page_size": 64,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "mem_fraction_static": 0.05,
    "random_seed": 1,
    "log_level": "warning",
    "enable_cache_report": True,
}
HIERARCHICAL: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_storage_backend": "dynamic",
    "hicache_storage_prefetch_policy": "wait_complete",
}
BACKEND: dict[str, Any] = {
    "backend_name": "ucm",
    "module_path": "ucm_sglang.backend",
    "class_name": "UCMStorage",
    "interface_v1": 1,
    "prefetch_threshold": 64,
}
SETTLE_S = 30.0


def warm_up() -> None:
    """Import everything an engine's processes need; no thread may exist afterwards."""
    warnings.simplefilter("ignore")
    import sglang_on_cpu

    sglang_on_cpu.install()
    import ucm_sglang.backend  # noqa: F401


def run_job(job: EngineJob) -> EngineResult:
    """Build the engine, run every round, shut it down. A failure is told in ``error``."""
    result = EngineResult(pid=os.getpid())
    try:
        _run(job, result)
    except BaseException as error:
        traceback.print_exc()
        result.error = f"{type(error).__name__}: {error}"
    return result


def _run(job: EngineJob, result: EngineResult) -> None:
    _fork_processes()
    import sglang

    if job.setup:
        resolve(job.setup)()
    arguments: dict[str, Any] = {**DEFAULT_ENGINE, "model_path": job.model}
    if job.connector is not None:
        extra = json.dumps({**BACKEND, **job.connector})
        arguments |= HIERARCHICAL | {"hicache_storage_backend_extra_config": extra}
    arguments |= job.engine
    started = time.monotonic()
    engine = sglang.Engine(**{k: v for k, v in arguments.items() if v is not None})
    try:
        result.init_s = time.monotonic() - started
        for spec in job.rounds:
            result.outputs.append(_round(engine, spec))
            result.metrics_by_round.append({})
        if job.scenario:
            result.extra = resolve(job.scenario)(engine, **job.scenario_args)
    finally:
        engine.shutdown()


def _fork_processes() -> None:
    """SGLang starts its processes in new interpreters; here they are forks of what is imported."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]


def _round(engine: Any, spec: Round) -> list[Output]:
    if spec.before:
        resolve(spec.before)(engine, **spec.before_args)
    if spec.reset_local:
        flush(engine)
    sampling = {"temperature": 0.0, "max_new_tokens": spec.max_tokens, "ignore_eos": True}
    batches = [spec.prompts] if spec.together else [[tokens] for tokens in spec.prompts]
    outputs = []
    for batch in batches:
        started = time.monotonic()
        answers = _generate(engine, batch, sampling, spec.cache_salt)
        took = time.monotonic() - started
        outputs += [_output(answer, took) for answer in answers]
    return outputs


def _generate(
    engine: Any, prompts: list[list[int]], sampling: dict[str, Any], salt: str | None
) -> list[dict[str, Any]]:
    """As ``Engine.generate``, which has no argument for a salt (the HTTP server's requests have)."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(input_ids=prompts, sampling_params=sampling, cache_salt=salt)
    stream = engine.tokenizer_manager.generate_request(request, None)
    answers: list[dict[str, Any]] = engine.loop.run_until_complete(stream.__anext__())
    return answers


def _output(answer: dict[str, Any], took: float) -> Output:
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return Output(
        tokens=list(answer["output_ids"]),
        cached=int(meta.get("cached_tokens") or 0),
        finish_reason=None,
        ttft_s=took,
        stored=int(details.get("storage") or 0),
    )


def flush(engine: Any) -> None:
    """Empty device and host cache. SGLang refuses while a request or a write is under way."""
    deadline = time.monotonic() + SETTLE_S
    while not engine.flush_cache().success:
        if time.monotonic() > deadline:
            raise TimeoutError("SGLang did not flush its caches")
        time.sleep(0.05)


def settle(engine: Any, root: str, count: int, pattern: str = "") -> int:
    """Wait until ``count`` objects (files of ``pattern``) are below ``root``; returns how many there are."""
    del engine
    deadline = time.monotonic() + SETTLE_S

    def stored() -> int:
        return len(list(Path(root).rglob(pattern)) if pattern else objects(Path(root)))

    while (found := stored()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} of {count} objects were stored")
        time.sleep(0.02)
    return found
