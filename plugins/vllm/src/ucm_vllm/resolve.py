"""From which blocks are present to how many tokens vLLM may skip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class HitRule:
    """One chain group: the leading run of present blocks, with a token left to compute."""

    block_tokens: int

    def usable(self, present: npt.NDArray[np.bool_], tokens: int, local: int) -> int:
        """Tokens from the start of a request of ``tokens`` that need no computing; at least ``local``."""
        run = len(present) if present.all() else int(present.argmin())
        limit = max(0, tokens - 1) // self.block_tokens
        return max(local, min(run, limit) * self.block_tokens)
