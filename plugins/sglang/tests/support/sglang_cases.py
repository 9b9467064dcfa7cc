"""Names and small builders that tests with real SGLang engines share. Needs no SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import ensure_model

from engine_harness import EngineJob, EngineResult, Round, prompt

PAGE = 64
#: Five whole pages and a tail.
PREFIX, TAIL, ANSWER = 320, 20, 8


def ucm(root: Path, **options: Any) -> dict[str, Any]:
    """Our part of the storage backend's configuration."""
    return {
        "store_pipeline": "Posix",
        "storage_backends": str(root),
        "staging_buffer_gb": "64 MiB",
        **options,
    }


def one_by_one(prompts: list[list[int]]) -> list[Round]:
    """A round a prompt, SGLang's own caches emptied before each: only storage can hit."""
    return [Round([tokens], max_tokens=ANSWER, reset_local=True) for tokens in prompts]


def job(
    model: str, rounds: list[Round], root: Path | None = None, stored: int = 0, **changes: Any
) -> EngineJob:
    """``stored``: objects that must lie below ``root`` before the engine ends."""
    made = EngineJob(str(ensure_model(model)), rounds, timeout_s=150.0, name=f"sglang-{model}")
    if root is not None:
        made.connector = ucm(root)
    if stored:
        made.scenario = "sglang_engine:settle"
        made.scenario_args = {"root": str(root), "count": stored}
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def answers(result: EngineResult) -> list[list[int]]:
    return [o.tokens for outputs in result.outputs for o in outputs]


def stored_tokens(result: EngineResult) -> list[int]:
    """Per prompt, what SGLang says it took from storage."""
    return [o.stored for outputs in result.outputs for o in outputs]


def two_ranks() -> dict[str, Any]:
    """What tensor parallelism over two ranks changes in a job."""
    return {"engine": {"tp_size": 2}, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}


__all__ = [
    "ANSWER",
    "PAGE",
    "PREFIX",
    "TAIL",
    "answers",
    "job",
    "one_by_one",
    "prompt",
    "stored_tokens",
    "two_ranks",
    "ucm",
]
