"""How far a prefix can be restored when several pools have a say (``batch_exists_v2``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Present = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PoolVote:
    """``present[i]``: page ``i`` of the prefix is stored in the pool. ``trailing``: a restored prefix needs
    the pool's last so many pages of it (a window, or 1 for a state); None: all of its pages."""

    name: str
    present: Present
    trailing: int | None = None


def leading(present: Present) -> int:
    """Pages of the run at the beginning."""
    missing = np.flatnonzero(~present)
    return int(missing[0]) if len(missing) else len(present)


def legal_lengths(kv_pages: int, votes: list[PoolVote]) -> tuple[list[int], dict[str, int]]:
    """All lengths in pages, ascending, at which every pool can continue; and per pool its own greatest.

    Ranks intersect such lists: a greatest length alone may be illegal on another rank.
    """
    legal = np.ones(kv_pages, dtype=bool)
    greatest: dict[str, int] = {}
    for vote in votes:
        own = _legal_of(vote, kv_pages)
        legal &= own
        reached = np.flatnonzero(own)
        if len(reached):
            greatest[vote.name] = int(reached[-1]) + 1
    return (np.flatnonzero(legal) + 1).tolist(), greatest


def _legal_of(vote: PoolVote, pages: int) -> Present:
    """``[i]``: the pool can continue after ``i + 1`` pages."""
    present = vote.present[:pages]
    places = np.arange(len(present))
    if vote.trailing is None:
        whole: Present = places < leading(present)
        return whole
    # Length of the run of present pages that ends at each place.
    last_missing = np.maximum.accumulate(np.where(present, -1, places))
    enough: Present = places - last_missing >= np.minimum(max(1, vote.trailing), places + 1)
    return enough
