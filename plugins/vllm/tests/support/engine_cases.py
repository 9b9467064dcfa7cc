"""Names and small builders that engine tests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_models import ensure_model

from engine_harness import EngineJob, EngineResult, Round, prompt

#: UCM's stored block.
BLOCK = 64
#: The shared prefix of the corpus, a whole number of stored blocks.
PREFIX = 320
TAIL = 20
ANSWER = 12

LOADED = "ucm:ucm_load_blocks_total"
LOAD_FAILED = "ucm:ucm_load_failed_blocks_total"
SAVED = "ucm:ucm_save_blocks_total"
SAVE_FAILED = "ucm:ucm_save_failed_blocks_total"

#: Prompts that share 320 tokens, and what stands for any unrelated one.
SHARED: list[int] = prompt(1, PREFIX)
CORPUS: list[list[int]] = [SHARED + prompt(seed, TAIL) for seed in (2, 3, 4)]
UNRELATED: list[int] = prompt(99, 200)

#: What MLA needs on the CPU.
MLA_ENGINE: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16}


def engine_of(model: str) -> dict[str, Any]:
    """Engine arguments a model needs on top of the defaults."""
    return dict(MLA_ENGINE) if model.startswith("deepseek") else {}


def checkpoint(model: str) -> str:
    """Path of a generated checkpoint."""
    return str(ensure_model(model))


def ucm(
    directory: Path,
    store: dict[str, Any] | None = None,
    policy: str = "recompute",
    **extra: Any,
) -> dict[str, Any]:
    """A ``kv_transfer_config`` with the plain file pipeline below ``directory``."""
    config = {"store_pipeline": "Posix", "storage_backends": str(directory), **(store or {})}
    return {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "ucm_connectors": [
                {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": config}
            ],
            **extra,
        },
    }


def one_by_one(prompts: list[list[int]], **options: Any) -> list[Round]:
    """A round per prompt, vLLM's own cache emptied before each: only the connector can hit."""
    return [
        Round([tokens], max_tokens=ANSWER, reset_local=True, **(options if i == 0 else {}))
        for i, tokens in enumerate(prompts)
    ]


def corpus_job(model: str = "qwen3", **changes: Any) -> EngineJob:
    """The corpus, prompt after prompt, with only the connector to hit."""
    job = EngineJob(
        checkpoint(model), one_by_one(CORPUS), engine=engine_of(model), name=f"corpus-{model}"
    )
    for name, value in changes.items():
        setattr(job, name, value)
    return job


def answers(result: EngineResult) -> list[list[int]]:
    """Generated tokens of every prompt, over all rounds."""
    return [o.tokens for outputs in result.outputs for o in outputs]


@dataclass(frozen=True)
class Truth:
    """What the corpus must answer: computed without a connector."""

    cold: list[list[int]]
    #: The later prompts when vLLM's own cache supplied exactly the shared prefix.
    local: list[list[int]]


@dataclass(frozen=True)
class Saved:
    """A directory that one engine process filled with the corpus and left."""

    directory: Path
    run: EngineResult
