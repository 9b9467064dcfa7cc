"""Where speculation gets its guesses. A wrong guess costs compute, never an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ucm_reference.request import Request


class Drafter(Protocol):
    """``limit``: tokens proposed at once at most."""

    limit: int

    def propose(self, request: Request, count: int) -> Sequence[int]:
        """At most ``count`` tokens that may follow ``request.tokens``."""


class NgramDrafter:
    """Repeats what followed the last two tokens when they occurred before."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit

    def propose(self, request: Request, count: int) -> Sequence[int]:
        tokens = request.tokens
        for at in range(len(tokens) - 3, -1, -1):
            if tokens[at : at + 2] == tokens[-2:]:
                return tokens[at + 2 : at + 2 + count]
        return []


class RecordedDrafter:
    """Proposes a recorded continuation with seeded mistakes, so that tests meet accepted and rejected
    drafts at a known rate. ``answers``: request id -> the expected output."""

    def __init__(
        self,
        answers: Mapping[str, Sequence[int]],
        limit: int = 3,
        right: float = 0.7,
        seed: int = 0,
    ) -> None:
        self.limit = limit
        self._answers, self._right = answers, right
        self._rng = np.random.default_rng(seed)

    def propose(self, request: Request, count: int) -> Sequence[int]:
        done = len(request.output)
        known = self._answers[request.request_id][done : done + count]
        rights = self._rng.random(len(known)) < self._right
        return [
            token if right else abs(token - 1) for token, right in zip(known, rights, strict=True)
        ]
