"""When to make a checkpoint. A policy filters what an engine can offer; it cannot conjure states.

The default policy keeps three kinds of positions, all on the grid on which every snapshot row can have
one *and* chain blocks end (:attr:`~ucm_core.spec.SpecTable.checkpoint_grid`), so that no checkpoint lies
out of reach:

a. the end of a request that computed something new;
b. the boundary that a request shares with an earlier one, when no checkpoint served it there: from the
   second appearance of a common prefix on, the third is served;
c. every N tokens, N being the smallest interval of the rows; off the grid, the grid position before.

Every snapshot row keeps every position: a state is usable only where all of them have one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ucm_core.coordinator.resolve import Positions
from ucm_core.spec.table import SpecTable


@dataclass(frozen=True, slots=True)
class Computation:
    """What an engine is about to compute, or has computed, of one request.

    Tokens ``[computed_from, tokens)``; nothing below ``computed_from`` needs a new checkpoint.
    ``shared``: the deepest boundary that this prompt has in common with an earlier request, 0 when
    there is none.
    """

    computed_from: int
    tokens: int
    shared: int = 0


class RetentionPolicy(Protocol):
    """Decides positions. Called on the scheduler's thread, once per request and once at its end; must
    be cheap and must not block. Registered through ``ucm_register_retention``."""

    def positions(self, table: SpecTable, work: Computation) -> Positions:
        """Ascending ``int64[k]``, each in ``(computed_from, tokens]`` and a multiple of
        ``table.checkpoint_grid``: where all snapshot rows shall keep a state."""


class DefaultRetention:
    """Triggers (a), (b) and (c) of the module text, from each row's ``Retention``. Stateless."""

    def positions(self, table: SpecTable, work: Computation) -> Positions:
        if not table.snapshots:
            return np.empty(0, np.int64)
        grid = table.checkpoint_grid
        wanted = [np.array([work.shared // grid * grid], np.int64)]
        rules = [row.retention for row in table.snapshots]
        intervals = [rule.interval for rule in rules if rule.interval is not None]
        if intervals:
            step = min(intervals)
            first = work.computed_from // step * step
            wanted.append(np.arange(first, work.tokens + 1, step, dtype=np.int64) // grid * grid)
        if any(rule.at_end for rule in rules):
            wanted.append(np.array([work.tokens // grid * grid], np.int64))
        found: Positions = np.unique(np.concatenate(wanted))
        return found[(found > work.computed_from) & (found <= work.tokens)]
