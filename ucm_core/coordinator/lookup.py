"""From a request's chain to one batched lookup per store, and from the answers to votes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator.resolve import Positions, Present
from ucm_core.identity import ContentChain, Ids
from ucm_core.spec.group import GroupSpec
from ucm_core.spec.keyspace import KeySpace, SeededCoordinate
from ucm_core.spec.kinds import RankRule

#: ``bool[N]`` per id, or ``bool[ranks, N]`` where each rank has a store of its own, or the number of
#: leading hits (for a store that :meth:`LookupPlan.is_prefix` names).
Answer = npt.NDArray[np.bool_] | int


@dataclass(frozen=True, slots=True)
class Segment:
    """Ids ``[begin, end)`` of one store's batch: one coordinate of a row.

    ``first``: the first block asked for (chain). ``positions``: tokens (snapshot), else None.
    """

    at: SeededCoordinate
    store: str
    begin: int
    end: int
    first: int = 0
    positions: Positions | None = None


@dataclass(frozen=True, slots=True)
class Votes:
    """What :func:`~ucm_core.coordinator.resolve.resolve_hit` takes."""

    present: Mapping[str, Present]
    checkpoints: Mapping[str, Positions]


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """``ids``: store name -> ``uint8[N, 16]``, to be asked in one call each."""

    ids: Mapping[str, Ids]
    segments: tuple[Segment, ...]

    def is_prefix(self, store: str) -> bool:
        """True when only the leading run of hits matters: ``lookup_on_prefix(ids) + 1`` will do."""
        mine = [s for s in self.segments if s.store == store]
        return len(mine) == 1 and mine[0].positions is None and mine[0].at.row.window is None

    def votes(self, answers: Mapping[str, Answer]) -> Votes:
        """Combine the stores' answers: every coordinate of a row must be there; of several ranks all
        (``intersection``) or any (``union``). Blocks that were not asked for count as not stored."""
        by_row: dict[str, list[Segment]] = {}
        for segment in self.segments:
            by_row.setdefault(segment.at.row.name, []).append(segment)
        present: dict[str, Present] = {}
        checkpoints: dict[str, Positions] = {}
        for name, segments in by_row.items():
            first = segments[0]
            if isinstance(answers[first.store], int) and not self.is_prefix(first.store):
                raise ValueError(
                    f"store {first.store!r}: a count is no answer here, give one per id"
                )
            there = combine(first.at.row, [_slice(s, answers[s.store]) for s in segments])
            if first.positions is not None:
                checkpoints[name] = first.positions[there]
            else:
                present[name] = np.concatenate([np.zeros(first.first, np.bool_), there])
        return Votes(present, checkpoints)


def _slice(segment: Segment, answer: Answer) -> npt.NDArray[np.bool_]:
    if isinstance(answer, int):
        return np.arange(segment.end - segment.begin) < answer
    return answer[..., segment.begin : segment.end]


def combine(row: GroupSpec, answers: list[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """``bool[N]`` from one answer per coordinate, each ``bool[N]`` or ``bool[ranks, N]``."""
    over_ranks = np.any if row.rank_rule is RankRule.UNION else np.all
    each = [a if a.ndim == 1 else over_ranks(a, axis=0) for a in answers]
    there: npt.NDArray[np.bool_] = np.logical_and.reduce(each)
    return there


def grid_positions(
    step: int,
    tokens: int,
    above: int = 0,
    most: int | None = None,
    interval: int | None = None,
) -> Positions:
    """Ascending multiples of ``step`` in ``(above, tokens)``: where a snapshot may lie that no
    directory knows of (a restart, another machine wrote it).

    ``most``: of more than so many positions, the deepest half is asked one by one; before it, multiples
    of ``interval`` (at which checkpoints are made) with a quarter, and every second, fourth, ... of all
    with the rest: each as fine as fits.
    """
    found = np.arange((above // step + 1) * step, tokens, step, dtype=np.int64)
    if most is None or len(found) <= most:
        return found
    deep = found[len(found) - most // 2 :]
    early = found[: len(found) - most // 2]
    room = most - len(deep)
    regular = found[:0] if interval is None else _thinned(early, interval, room // 2)
    thin = _thinned(early, step, room - len(regular))
    asked: Positions = np.concatenate([np.union1d(regular, thin), deep])
    return asked


def _thinned(positions: Positions, stride: int, most: int) -> Positions:
    """Multiples of ``stride``, or of the least power of two times it, of which there are at most ``most``."""
    kept: Positions = positions[positions % stride == 0]
    while len(kept) > most:
        stride *= 2
        kept = kept[kept % stride == 0]
    return kept


def plan_lookup(
    keys: KeySpace,
    chain: ContentChain,
    *,
    skip_tokens: int = 0,
    positions: Mapping[str, Positions] | None = None,
    store_of: Callable[[SeededCoordinate], str] = lambda at: at.row.store,
) -> LookupPlan:
    """The ids that decide a hit for ``chain``, one array per store.

    ``skip_tokens``: do not ask about blocks that end below (the engine has them). ``positions``: per
    snapshot row, where to ask; default every position that all snapshot rows can have in common.
    ``store_of``: which store holds a coordinate. Sidecars and ``none`` rows are not asked for: they
    have no say.
    """
    batches: dict[str, list[Ids]] = {}
    sizes: dict[str, int] = {}
    segments: list[Segment] = []

    def add(at: SeededCoordinate, ids: Ids, first: int, where: Positions | None) -> None:
        store = store_of(at)
        begin = sizes.get(store, 0)
        batches.setdefault(store, []).append(ids)
        sizes[store] = begin + len(ids)
        segments.append(Segment(at, store, begin, begin + len(ids), first, where))

    for row in keys.table.chains:
        for at in keys.of(row.name):
            first = min(skip_tokens, chain.tokens) // row.block_tokens
            add(at, keys.block_ids(at, chain, first), first, None)
    for row in keys.table.snapshots:
        where = (positions or {}).get(row.name)
        if where is None:
            where = grid_positions(keys.table.snapshot_grid, chain.tokens, skip_tokens)
        for at in keys.of(row.name):
            add(at, chain.snapshot_ids(at.seed, where.astype(np.uint64)), 0, where)
    ids = {store: np.concatenate(arrays) for store, arrays in batches.items()}
    return LookupPlan(ids, tuple(segments))
