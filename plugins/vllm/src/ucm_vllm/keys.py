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
#: Failed loads after which a block is not offered again, whatever a save of it says.
MAX_STRIKES = 3


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

    A block that fails after being saved anew gets strikes: with ``MAX_STRIKES`` it is not forgiven any
    more, because its storage says "saved" and cannot deliver it.
    """

    def __init__(self, limit: int = BAD_LIMIT) -> None:
        self._limit = limit
        self._keys: Prints = np.empty(0, dtype=np.uint64)
        self._strikes = np.empty(0, dtype=np.uint8)
        self._blocked = np.empty(0, dtype=bool)

    def __len__(self) -> int:
        """Blocks not offered at present."""
        return int(self._blocked.sum())

    def add(self, prints: Prints) -> None:
        known = np.isin(self._keys, prints)
        self._blocked[known] = True
        self._strikes[known] = np.minimum(self._strikes[known] + 1, MAX_STRIKES)
        fresh = prints[~np.isin(prints, self._keys)]
        cut = slice(-self._limit, None)
        self._keys = np.concatenate([self._keys, fresh])[cut]
        self._strikes = np.concatenate([self._strikes, np.ones(len(fresh), dtype=np.uint8)])[cut]
        self._blocked = np.concatenate([self._blocked, np.ones(len(fresh), dtype=bool)])[cut]

    def forgive(self, prints: Prints) -> None:
        """They were saved anew."""
        if len(self._keys):
            forgiven = np.isin(self._keys, prints) & (self._strikes < MAX_STRIKES)
            self._blocked[forgiven] = False

    def contains(self, prints: Prints) -> npt.NDArray[np.bool_]:
        if not len(self._keys):
            return np.zeros(len(prints), dtype=bool)
        return np.isin(prints, self._keys[self._blocked])
