"""A request and where it is."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class Phase(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True)
class Request:
    """``tokens``: prompt, then confirmed output. ``computed``: tokens whose cache is in memory.

    ``tables``: group -> pages from token 0 on (0: none). ``states``: slots the running state rotates
    through, ``state``: the one that is valid. ``boundary``: (position, slot) of the last state kept
    at a checkpoint position. ``digests``: one a generated token, of the exact final activations.
    ``added_at``: when the scheduler got it; ``first_token_s``: from then to its first token; the same in
    CPU seconds of this process (all threads) in ``added_cpu`` and ``first_token_cpu_s``.
    ``reused``: tokens that came from a cache when the request was admitted last.
    """

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    media: int = 0
    phase: Phase = Phase.WAITING
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    tables: dict[str, list[int]] = field(default_factory=dict)
    states: list[int] = field(default_factory=list)
    state: int = 0
    boundary: tuple[int, int] = (0, 0)
    scratch: int = 0
    drafts: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    reused: int = 0
    preemptions: int = 0
    added_at: float = 0.0
    first_token_s: float | None = None
    added_cpu: float = 0.0
    first_token_cpu_s: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt or self.max_tokens < 1:
            raise ValueError(
                f"request {self.request_id!r}: a prompt and max_tokens >= 1 are needed"
            )
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return len(self.tokens) - len(self.prompt) >= self.max_tokens
