"""What an engine process is asked to do, and what it reports. Plain data, JSON both ways."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
LOCAL_HITS = "vllm:prefix_cache_hits"
PREEMPTIONS = "vllm:num_preemptions"


def prompt(seed: int, tokens: int) -> list[int]:
    """``tokens`` random token ids (3..999), the same for the same seed in every process."""
    stream = random.Random(seed)
    return [stream.randrange(3, 1000) for _ in range(tokens)]


@dataclass
class Round:
    """Prompts sent to a running engine: in one batch, or one after the other."""

    prompts: list[list[int]]
    max_tokens: int = 8
    together: bool = True
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    #: ``LoRARequest`` as keywords.
    lora: dict[str, Any] | None = None
    #: Empty vLLM's own prefix cache first, so that only the connector can hit.
    reset_local: bool = False
    #: ``module:function`` called with the engine (`LLM`) and ``before_args`` ahead of the prompts.
    before: str | None = None
    before_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineJob:
    """One engine process: how to build it and the rounds of prompts to run."""

    #: Path of the checkpoint; empty: no engine, only the scenario, called with None.
    model: str
    rounds: list[Round] = field(default_factory=list)
    #: The engine's ``kv_transfer_config``, or None for a run without a connector.
    connector: dict[str, Any] | None = None
    #: Engine arguments on top of the small defaults of `engine.py`; None drops a default.
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    #: ``module:function`` called without arguments before the engine is built.
    setup: str | None = None
    #: ``module:function`` called with the engine and ``scenario_args`` after the rounds; what it
    #: returns (JSON) comes back as ``EngineResult.extra``.
    scenario: str | None = None
    scenario_args: dict[str, Any] = field(default_factory=dict)
    #: False: the process ends without shutting the engine down, as a killed one would.
    shutdown: bool = True
    #: Seconds after which the whole process group is killed.
    timeout_s: float = 120.0
    name: str = "engine"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EngineJob:
        return cls(**{**data, "rounds": [Round(**r) for r in data["rounds"]]})


@dataclass
class Output:
    """What one prompt got. ``cached`` counts tokens not computed, local and external hits alike."""

    tokens: list[int]
    cached: int
    finish_reason: str | None
    ttft_s: float
    prompt_logprobs: list[float | None] | None = None
    #: Of ``cached``, those that came from storage (SGLang says so per prompt).
    stored: int = 0


@dataclass
class EngineResult:
    """What came back. Metrics are cumulative; ``metrics_by_round[i]`` was read after round i.

    ``prometheus`` holds every sample of the process's registry, labels summed away.
    """

    outputs: list[list[Output]] = field(default_factory=list)
    metrics_by_round: list[dict[str, float]] = field(default_factory=list)
    prometheus: dict[str, float] = field(default_factory=dict)
    extra: Any = None
    error: str = ""
    pid: int = 0
    init_s: float = 0.0
    exit_code: int | None = None
    timed_out: bool = False
    wall_s: float = 0.0
    log: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EngineResult:
        outputs = [[Output(**o) for o in outs] for outs in data.pop("outputs", [])]
        return cls(outputs=outputs, **data)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.error and not self.timed_out

    def require_ok(self) -> EngineResult:
        """Raise with the end of the log when the engine failed, hung or was killed."""
        if not self.ok:
            reason = "killed at its deadline" if self.timed_out else self.error or "no error text"
            raise AssertionError(
                f"engine process ended with {self.exit_code}: {reason}\n--- end of its log ---\n"
                + self.log[-6000:]
            )
        return self

    def tokens(self, round_index: int = -1) -> list[list[int]]:
        """Generated token ids of each prompt of a round."""
        return [o.tokens for o in self.outputs[round_index]]

    def metric(self, name: str, round_index: int = -1) -> float:
        """Increase of a metric during one round (the last by default)."""
        now = self.metrics_by_round[round_index].get(name, 0.0)
        at = round_index % len(self.metrics_by_round)
        return now - (self.metrics_by_round[at - 1].get(name, 0.0) if at else 0.0)

    def external_hits(self, round_index: int = -1) -> int:
        """Prompt tokens that vLLM says the connector supplied in a round."""
        return int(self.metric(EXTERNAL_HITS, round_index))

    def local_hits(self, round_index: int = -1) -> int:
        """Prompt tokens that vLLM's own prefix cache supplied in a round."""
        return int(self.metric(LOCAL_HITS, round_index))
