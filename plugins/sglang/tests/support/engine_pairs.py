"""Jobs for either engine over one directory, in the same words. Needs neither engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import engine_cases
import sglang_cases
from engine_harness import EngineJob, EnginePool, EngineResult, Round

Engine = Literal["vllm", "sglang"]


@dataclass
class Pair:
    """The two engines' pools. Every call runs one engine process with one prompt after another."""

    vllm: EnginePool
    sglang: EnginePool
    model: str = "llama"
    #: Of the namespace, for both engines.
    options: dict[str, Any] = field(default_factory=dict)

    def run(
        self,
        engine: Engine,
        prompts: list[list[int]],
        root: Path | None = None,
        *,
        stored: int = 0,
        tp: int = 1,
        warm: bool = False,
        **arguments: Any,
    ) -> EngineResult:
        """``root``: of the cache, None for no cache. ``stored``: objects that must be there before the
        engine ends. ``warm``: each prompt is asked twice, the second time with the engine's own caches as
        they are. ``arguments``: of the engine."""
        job = self._vllm if engine == "vllm" else self._sglang
        made = job(prompts, root, stored, tp, warm, arguments)
        pool = self.vllm if engine == "vllm" else self.sglang
        return pool.run(made).require_ok()

    def _vllm(
        self,
        prompts: list[list[int]],
        root: Path | None,
        stored: int,
        tp: int,
        warm: bool,
        arguments: dict[str, Any],
    ) -> EngineJob:
        job = EngineJob(engine_cases.checkpoint(self.model), name=f"vllm-{self.model}")
        own_cache: dict[str, Any] = {"enable_prefix_caching": warm}
        if warm and self.model.startswith("deepseek"):  # its own hits end where ours do
            own_cache["block_size"] = sglang_cases.PAGE
        job.engine = {**engine_cases.engine_of(self.model), **own_cache, **arguments}
        job.rounds = _rounds(prompts, warm, flush=False)
        job.timeout_s = 180.0
        if warm:
            job.setup = "engine_scenarios:allow_local_prefix_cache"
        if root is not None:
            job.connector = engine_cases.ucm(root, {}, **self.options)
        if stored and tp == 1:  # with workers of their own, ending the engine waits for saves
            job.scenario = "engine_scenarios:leftovers"
        if tp > 1:
            job.engine["tensor_parallel_size"] = tp
            job.env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        return job

    def _sglang(
        self,
        prompts: list[list[int]],
        root: Path | None,
        stored: int,
        tp: int,
        warm: bool,
        arguments: dict[str, Any],
    ) -> EngineJob:
        rounds = _rounds(prompts, warm, flush=root is not None)
        job = sglang_cases.job(self.model, rounds, root, stored)
        if root is not None:
            job.connector = sglang_cases.ucm(root, **self.options)
        job.engine = dict(arguments)
        if self.model.startswith("deepseek"):
            job.engine = {"dtype": "bfloat16", **job.engine}
        if tp > 1:
            job.engine["tp_size"] = tp
            job.env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        return job


def _rounds(prompts: list[list[int]], warm: bool, *, flush: bool) -> list[Round]:
    answer = sglang_cases.ANSWER
    rounds = []
    for tokens in prompts:
        rounds.append(Round([tokens], answer, reset_local=flush))
        if warm:
            rounds.append(Round([tokens], answer))
    return rounds


def hits(result: EngineResult) -> list[int]:
    """Per prompt, tokens that came from the cache directory by the engine's own count."""
    return [
        outputs[0].stored or result.external_hits(number)
        for number, outputs in enumerate(result.outputs)
    ]


def answers(result: EngineResult) -> list[list[int]]:
    return [o.tokens for outputs in result.outputs for o in outputs]
