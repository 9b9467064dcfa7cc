"""How many checkpoints may stay, and which: value = frequency x recency."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ucm_core.spec.table import SpecTable

#: A checkpoint of every snapshot row: (position, link).
Place = tuple[int, bytes]


def budgeted_checkpoints(table: SpecTable) -> int | None:
    """Checkpoints that fit the tightest ``budget_bytes`` of the snapshot rows; None without a budget.

    A checkpoint is useful only while every row has it, so the tightest row decides for all of them.
    At least one always fits.
    """
    limits = [
        row.retention.budget_bytes // (row.shard_bytes * len(row.layers))
        for row in table.snapshots
        if row.retention.budget_bytes is not None
    ]
    return max(1, min(limits)) if limits else None


class CheckpointBudget:
    """Checkpoints that this process had stored, at most ``limit``. Not thread-safe: its owner locks.

    ``value = uses / (1 + age)``, the age counted in events of this budget since the last use: a
    checkpoint used often outlives one just made and never used, and an old favourite fades. What
    other hosts stored is not counted here; the stages below have capacities of their own.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self.limit = limit
        #: Checkpoints given up for better ones.
        self.evicted = 0
        self._slots: dict[Place, int] = {}
        self._places: list[Place] = []
        self._uses: npt.NDArray[np.float64] = np.zeros(0)
        self._last: npt.NDArray[np.float64] = np.zeros(0)
        self._tick = 0.0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, place: Place) -> bool:
        return place in self._slots

    def add(self, place: Place) -> Place | None:
        """``place`` was stored. Returns the checkpoint to remove for it, if one has to go."""
        self._tick += 1
        if place in self._slots:
            self._last[self._slots[place]] = self._tick
            return None
        victim: Place | None = None
        if len(self._places) >= self.limit:
            values = self._uses[: len(self._places)] / (
                1.0 + self._tick - self._last[: len(self._places)]
            )
            victim = self._places[int(values.argmin())]
            self.forget(victim)
            self.evicted += 1
        at = len(self._places)
        if at == len(self._uses):
            grown = np.zeros(max(16, at))
            self._uses = np.concatenate([self._uses, grown])
            self._last = np.concatenate([self._last, grown])
        self._places.append(place)
        self._slots[place] = at
        self._uses[at], self._last[at] = 1.0, self._tick
        return victim

    def use(self, place: Place) -> None:
        """A request continues from ``place``. Unknown places (another host's) are fine."""
        self._tick += 1
        at = self._slots.get(place)
        if at is not None:
            self._uses[at] += 1.0
            self._last[at] = self._tick

    def forget(self, place: Place) -> None:
        """``place`` is gone. Unknown places are fine."""
        at = self._slots.pop(place, None)
        if at is None:
            return
        moved = self._places.pop()
        end = len(self._places)
        if at != end:
            self._places[at] = moved
            self._slots[moved] = at
            self._uses[at], self._last[at] = self._uses[end], self._last[end]
