"""Samples, series and interleaved repetitions.

A single figure of a shared machine says little. Contestants therefore run in turns (one repetition
of each per round, the order rotating), and a ratio is the median of the *per-round* ratios: whatever
disturbed a round disturbed both sides of its ratio.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: wall and CPU seconds (every thread of the process), what was moved."""

    wall_s: float
    cpu_s: float
    nbytes: int = 0
    operations: int = 0


def cpu_seconds() -> float:
    """CPU seconds of all threads of this process so far, kernel time included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(action: Callable[[], object], *, nbytes: int = 0, operations: int = 0) -> Sample:
    """Run ``action`` once under the meter."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    action()
    return Sample(time.perf_counter() - wall, cpu_seconds() - cpu, nbytes, operations)


@dataclass(slots=True)
class Series:
    """The samples of one contestant, one per round."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Median wall seconds of a repetition."""
        return median(s.wall_s for s in self.samples)

    @property
    def cpu_s(self) -> float:
        """Median CPU seconds of a repetition."""
        return median(s.cpu_s for s in self.samples)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median wall: how far to trust the figure."""
        walls = [s.wall_s for s in self.samples]
        return (max(walls) - min(walls)) / self.wall_s

    @property
    def gb_per_s(self) -> float:
        return self.samples[0].nbytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.samples[0].nbytes / 1e9)

    @property
    def operations_per_s(self) -> float:
        return self.samples[0].operations / self.wall_s


def wall_ratio(ours: Series, reference: Series) -> float:
    """Our wall time over the reference's: median of the per-round ratios."""
    return _paired(ours, reference, lambda s: s.wall_s)


def cpu_ratio(ours: Series, reference: Series) -> float:
    """Our CPU time over the reference's: median of the per-round ratios."""
    return _paired(ours, reference, lambda s: s.cpu_s)


def _paired(ours: Series, reference: Series, value: Callable[[Sample], float]) -> float:
    pairs = list(zip(ours.samples, reference.samples, strict=True))
    return median(value(a) / max(value(b), 1e-9) for a, b in pairs)


def interleave(
    contestants: Mapping[str, Callable[[], Sample]], *, rounds: int, warmups: int = 1
) -> dict[str, Series]:
    """``rounds`` repetitions of each contestant in turns, after ``warmups`` that are thrown away."""
    names = list(contestants)
    series = {name: Series() for name in names}
    for index in range(-warmups, rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            sample = contestants[name]()
            if index >= 0:
                series[name].samples.append(sample)
    return series
