"""Scheduler side: what a step computed stays unpublished until every rank's loads of it were good.

With loads layer by layer a request computes in the step that brings its load. A rank that lacks a layer
computes wrong values, and by the next all-reduce so do the others: what any of them saves in that step
must not become visible. So workers keep those blocks open, this side waits for the step's reports, and
releases or drops them with the next message.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class _Held:
    step: int
    pages: npt.NDArray[np.int64]


class Releases:
    """Saves that wait for their step. ``workers``: ranks that report each step."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._held: dict[int, _Held] = {}
        self._reports: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, op_id: int, step: int, pages: npt.NDArray[np.int64]) -> None:
        """A save issued in ``step``. ``pages``: engine blocks that its request has computed on."""
        self._held[op_id] = _Held(step, pages)

    def forget(self, op_id: int) -> None:
        """The save has ended without us (failed, fenced)."""
        self._held.pop(op_id, None)

    def seen(self, steps: Mapping[int, int], bad_pages: Set[int]) -> tuple[list[int], list[int]]:
        """(released, dropped) operations, given how many ranks reported which steps just now and the
        engine blocks whose loads any of them failed."""
        dropped = []
        if bad_pages:
            bad = np.fromiter(bad_pages, dtype=np.int64)
            dropped = [op for op, held in self._held.items() if np.isin(held.pages, bad).any()]
            for op_id in dropped:
                del self._held[op_id]
        released: list[int] = []
        for step, count in steps.items():
            self._reports[step] = self._reports.get(step, 0) + count
            if self._reports[step] == self._workers:
                del self._reports[step]
                released += [op for op, held in self._held.items() if held.step <= step]
        for op_id in released:
            self._held.pop(op_id, None)
        return released, dropped
