"""Who writes what: one writer per object, another one when it fails; one owner per segment under CP."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]


def writer_of(blocks: Blocks, ranks: int, attempt: int = 0) -> Blocks:
    """``int64[N]``: the rank elected to save each block of a ``union`` group, whose content all ranks
    have: block index mod ranks, and the next rank for each ``attempt`` that failed.

    After ``ranks`` attempts every rank has tried: the block is lost only when all of them failed.
    """
    if ranks < 1 or not 0 <= attempt < ranks:
        raise ValueError(f"attempt {attempt} of {ranks} ranks")
    return (blocks + attempt) % ranks


def segment_owner(blocks: Blocks, ranks: int, run: int = 1) -> Blocks:
    """``int64[N]``: the context-parallel rank that holds each block of a sequence cut into runs of
    ``run`` blocks, dealt out in turn. One contiguous segment a rank is ``run = ceil(blocks / ranks)``."""
    if ranks < 1 or run < 1:
        raise ValueError(f"{ranks} ranks, runs of {run} blocks")
    return (blocks // run) % ranks


@dataclass(slots=True)
class _Open:
    missing: set[tuple[Hashable, int]]
    failed: set[tuple[Hashable, int]] = field(default_factory=set)


class Completion:
    """What of a request's transfers is still open, per (unit, segment). One thread.

    A request is complete when every segment of every unit has answered, in whatever order; a unit is
    ready when all of its segments are in. A failure is an answer: ``failed`` names it.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def expect(self, request: str, parts: Iterable[tuple[Hashable, int]]) -> None:
        """These (unit, segment) pairs will answer. Raises ValueError for a request that is open."""
        if request in self._open:
            raise ValueError(f"request {request!r} has open transfers already")
        self._open[request] = _Open(set(parts))

    def settle(self, request: str, unit: Hashable, segment: int, *, ok: bool) -> bool:
        """One answer. True exactly once per request: with its last one. Late news of unknown requests,
        and repeated answers, change nothing."""
        entry = self._open.get(request)
        part = (unit, segment)
        if entry is None or part not in entry.missing:
            return False
        entry.missing.discard(part)
        if not ok:
            entry.failed.add(part)
        return not entry.missing

    def ready(self, request: str, unit: Hashable) -> bool:
        """Every segment of ``unit`` has answered, and well."""
        entry = self._open.get(request)
        if entry is None:
            return False
        return all(u != unit for u, _ in entry.missing) and all(u != unit for u, _ in entry.failed)

    def close(self, request: str) -> set[tuple[Hashable, int]]:
        """Forget the request; returns the parts that failed or never answered."""
        entry = self._open.pop(request, None)
        return set() if entry is None else entry.failed | entry.missing
