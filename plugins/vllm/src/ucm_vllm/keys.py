"""Two small memories of the scheduler side, keyed by the first 8 bytes of a chain link.

A link is a SHA-256, so 64 bits of it tell blocks apart well enough here: a collision can only make us
skip a save or not offer a hit, never use wrong bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Prints = npt.NDArray[np.uint64]

#: Blocks remembered as unloadable. When it is full the oldest is forgotten and may be tried again.
BAD_LIMIT = 65_536


def fingerprints(links: npt.NDArray[np.uint8]) -> Prints:
    """``uint64[N]`` of ``links`` ``uint8[N, 32]``."""
    return np.ascontiguousarray(links[:, :8]).view(np.uint64).reshape(-1)


class PendingKeys:
    """Blocks being saved, by operation, so that no second request saves them too."""

    def __init__(self) -> None:
        self._by_op: dict[int, Prints] = {}
        self._all: Prints = np.empty(0, dtype=np.uint64)
        self._stale = False

    def __len__(self) -> int:
        return len(self._by_op)

    def add(self, op_id: int, prints: Prints) -> None:
        self._by_op[op_id] = prints
        self._stale = True

    def get(self, op_id: int) -> Prints | None:
        return self._by_op.get(op_id)

    def remove(self, op_id: int) -> Prints | None:
        self._stale = True
        return self._by_op.pop(op_id, None)

    def contains(self, prints: Prints) -> npt.NDArray[np.bool_]:
        if self._stale:
            parts = list(self._by_op.values())
            self._all = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
            self._stale = False
        if not len(self._all):
            return np.zeros(len(prints), dtype=bool)
        return np.isin(prints, self._all)


class BadKeys:
    """Blocks whose load failed: not offered again until they were saved anew. Bounded, oldest out.

    Each request recomputes at most once for a failed load and saving it anew forgives the block, so a
    medium that saves but cannot deliver costs one failed load per save, never a loop.
    """

    def __init__(self, limit: int = BAD_LIMIT) -> None:
        self._limit = limit
        self._keys: Prints = np.empty(0, dtype=np.uint64)

    def __len__(self) -> int:
        """Blocks not offered at present."""
        return len(self._keys)

    def add(self, prints: Prints) -> None:
        fresh = prints[~np.isin(prints, self._keys)]
        self._keys = np.concatenate([self._keys, fresh])[-self._limit :]

    def clear(self) -> None:
        """Forget all."""
        self._keys = np.empty(0, dtype=np.uint64)

    def forgive(self, prints: Prints) -> None:
        """They were saved anew."""
        if len(self._keys):
            self._keys = self._keys[~np.isin(self._keys, prints)]

    def contains(self, prints: Prints) -> npt.NDArray[np.bool_]:
        if not len(self._keys):
            return np.zeros(len(prints), dtype=bool)
        return np.isin(prints, self._keys)
