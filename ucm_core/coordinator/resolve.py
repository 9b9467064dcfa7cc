"""``resolve_hit``: answers of stores in, one hit plan out. Pure: no I/O, no bytes, no state.

Cost: a few numpy operations per row of the table; a plain chain row costs one scan for its first
missing block, nothing is a Python loop over blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ucm_core.spec.group import GroupSpec
from ucm_core.spec.kinds import Kind
from ucm_core.spec.table import SpecTable

#: What a store said about a chain row: ``bool[blocks]``, block 0 first, or the number of leading hits
#: (then nothing is known of later blocks). In blocks of the row.
Present = npt.NDArray[np.bool_] | int
#: Token positions at which a snapshot row has every coordinate, for this very prefix.
Positions = npt.NDArray[np.int64]

_NO_CHECKPOINTS: Mapping[str, Positions] = MappingProxyType({})
_NOWHERE: Positions = np.empty(0, np.int64)


class Reason(enum.Enum):
    """What kept ``p_star`` from being larger. The first that applies, in this order."""

    LOCAL = "the engine itself has as much"
    CHECKPOINT = "no deeper position has a checkpoint of every state group"
    WINDOW = "a sliding window needs blocks that are gone"
    CHAIN = "a chain group's stored prefix ends"
    RESERVE = "tokens are left for the engine to compute"
    ALIGNMENT = "the engine continues only from aligned positions"
    PROMPT = "the whole prompt is stored as far as whole blocks go"


@dataclass(frozen=True, slots=True)
class HitPlan:
    """The answer for one request.

    ``l``: tokens of chain data usable (store or engine), on the common grid. ``p_star``: where the
    engine continues; never below ``local`` (what the engine has). ``lengths``: per voting row, blocks
    in ``[0, l)``. ``load``: per stored row, blocks ``[start, stop)`` that must be loaded so that the
    engine can continue at ``p_star``; a snapshot row has none (its object is the one at ``p_star``).
    ``row``: the row that limited, where one did.
    """

    l: int  # noqa: E741 - the spec's own name
    p_star: int
    local: int
    lengths: Mapping[str, int]
    load: Mapping[str, tuple[int, int]]
    reason: Reason
    row: str | None = None

    @property
    def external(self) -> int:
        """Tokens that the engine gets from stores instead of computing them."""
        return self.p_star - self.local


def resolve_hit(
    table: SpecTable,
    tokens: int,
    present: Mapping[str, Present],
    checkpoints: Mapping[str, Positions] = _NO_CHECKPOINTS,
    *,
    local: int = 0,
    alignment: int = 1,
    reserve: int = 1,
) -> HitPlan:
    """Decide how much of a prompt of ``tokens`` tokens is taken from stores.

    ``present``: the answer for every chain row. ``checkpoints``: for every snapshot row (absent: none).
    Coordinates and ranks are combined before (``coordinator.lookup``). ``local``: tokens the engine
    has already; blocks that end below it need not be stored. ``alignment``: the engine continues only
    from its multiples. ``reserve``: tokens always left to compute, at least 1 (more with speculation).

    Raises ValueError for arguments that cannot be, and KeyError for a chain row without an answer.
    """
    if not 0 <= local <= tokens:
        raise ValueError(f"local hit {local} is not within the prompt of {tokens} tokens")
    if alignment < 1 or reserve < 1:
        raise ValueError(f"alignment {alignment} and reserve {reserve} must be at least 1")
    votes = [_vote(row, present, tokens, local) for row in table.chains]
    windows = [vote for vote in votes if vote.row.window is not None]

    limit = min([tokens, *(vote.reach for vote in votes)])
    top = limit // table.common_grid * table.common_grid
    depth = _deepest(_down_from(top, table.common_grid, 0), windows) if windows else top

    ceiling = min(depth, tokens - reserve)
    if table.snapshots:
        common = _common(table, checkpoints)
        usable = common[(common <= ceiling) & (common % alignment == 0) & (common > local)]
        continued = _deepest(usable[::-1], windows)
    else:
        best = max(ceiling, 0) // alignment * alignment
        continued = _deepest(_down_from(best, alignment, local), windows) if windows else best

    p_star = max(continued, local)
    lengths = {row.name: depth // row.block_tokens for row in table.chains}
    reason, row = _reason(table, votes, top, depth, ceiling, p_star, local, tokens, alignment)
    return HitPlan(depth, p_star, local, lengths, _load(table, local, p_star), reason, row)


@dataclass(frozen=True, slots=True)
class _Vote:
    """One chain row's say. ``reach``: tokens up to which its blocks can count at all. ``missing``: for a
    windowed row ``int64[n + 1]``, number of missing blocks before each block."""

    row: GroupSpec
    reach: int
    missing: npt.NDArray[np.int64] | None = None

    def accepts(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """``bool[k]``: are the blocks that the window needs at each position there? Positions are at
        most ``reach``."""
        assert self.missing is not None and self.row.window is not None
        block = self.row.block_tokens
        first = np.maximum(positions - self.row.window, 0) // block
        last = -(-positions // block)
        answer: npt.NDArray[np.bool_] = self.missing[last] == self.missing[first]
        return answer


def _vote(row: GroupSpec, present: Mapping[str, Present], tokens: int, local: int) -> _Vote:
    block = row.block_tokens
    held = local // block  # blocks the engine has whole
    answer = present[row.name]
    if isinstance(answer, int):
        run = min(max(answer, held), tokens // block)
        if row.window is None:
            return _Vote(row, run * block)
        answer = np.ones(run, np.bool_)
    if answer.dtype != np.bool_:
        raise TypeError(f"row {row.name!r}: an answer of {answer.dtype}, expected bool or a count")
    there = answer[: tokens // block]
    if row.window is None:
        rest = there[held:]
        run = held + (len(rest) if rest.all() else int(rest.argmin()))
        return _Vote(row, run * block)
    gone = ~there
    gone[:held] = False
    missing = np.zeros(max(len(there), held) + 1, np.int64)
    np.cumsum(gone, out=missing[1 : len(gone) + 1])
    missing[len(gone) + 1 :] = missing[len(gone)]
    return _Vote(row, (len(missing) - 1) * block, missing)


def _down_from(top: int, step: int, above: int) -> Positions:
    """``top, top - step, ...`` down to the last one over ``above``."""
    return np.arange(top, above, -step, dtype=np.int64)


def _deepest(descending: Positions, windows: list[_Vote]) -> int:
    """The first of ``descending`` that every window accepts, else 0: the fixed point of lowering the
    boundary to what one window accepts and asking all again. Usually the first one is it."""
    for candidates in (descending[:1], descending[1:]):
        accepted = np.ones(len(candidates), np.bool_)
        for vote in windows:
            accepted &= vote.accepts(candidates)
        if accepted.any():
            return int(candidates[accepted.argmax()])
    return 0


def _common(table: SpecTable, checkpoints: Mapping[str, Positions]) -> Positions:
    """Ascending positions at which *every* snapshot row has a checkpoint."""
    return reduce(_both, [_ascending(checkpoints.get(r.name, _NOWHERE)) for r in table.snapshots])


def _ascending(positions: Positions) -> Positions:
    """Lookups answer in order; only what a directory collected needs sorting."""
    return positions if (positions[1:] > positions[:-1]).all() else np.unique(positions)


def _both(a: Positions, b: Positions) -> Positions:
    """Positions in both of two ascending arrays."""
    if not len(a) or not len(b):
        return _NOWHERE
    found = np.minimum(np.searchsorted(b, a), len(b) - 1)
    both: Positions = a[b[found] == a]
    return both


def _load(table: SpecTable, local: int, p_star: int) -> dict[str, tuple[int, int]]:
    """Blocks of each chain row, and of its sidecars, that hold tokens of ``[local, p_star)``; of a
    windowed row only those the window still reaches."""
    ranges: dict[str, tuple[int, int]] = {}
    for row in table.chains:
        first, stop = row.needed(p_star)
        start = max(local // row.block_tokens, first)
        ranges[row.name] = (start, stop) if p_star > local else (start, start)
    for row in table.rows:
        if row.kind is Kind.SIDECAR and row.follows in ranges:
            ranges[row.name] = ranges[row.follows]
    return ranges


def _reason(
    table: SpecTable,
    votes: list[_Vote],
    top: int,
    depth: int,
    ceiling: int,
    p_star: int,
    local: int,
    tokens: int,
    alignment: int,
) -> tuple[Reason, str | None]:
    if p_star == local > 0:
        return Reason.LOCAL, None
    aligned = max(ceiling, 0) // alignment * alignment
    if p_star < aligned:
        if table.snapshots:
            return Reason.CHECKPOINT, None
        return Reason.WINDOW, next((v.row.name for v in votes if v.missing is not None), None)
    if depth < top:
        rejecting = [v for v in votes if v.missing is not None]
        where = np.array([top], np.int64)
        return Reason.WINDOW, next(v.row.name for v in rejecting if not v.accepts(where)[0])
    if ceiling < depth:
        return Reason.RESERVE, None
    if p_star < ceiling:
        return Reason.ALIGNMENT, None
    shortest = min(votes, key=lambda v: v.reach, default=None)
    if shortest is not None and shortest.reach < tokens // table.common_grid * table.common_grid:
        return Reason.CHAIN, shortest.row.name
    return Reason.PROMPT, None
