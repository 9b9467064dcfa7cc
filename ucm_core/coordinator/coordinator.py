"""One deployment's decisions: what to ask, how far a hit reaches, where to leave checkpoints.

Ties the pure functions to the state they need: a checkpoint directory per snapshot row, the prefixes
seen, the budget, and a retention policy. Starts no transfer and touches no store: it names ids to ask
for, positions to keep and keys to remove; the adapter does it.

The life of a request, and who calls::

    plan = coordinator.plan(chain, local=...)             scheduler; may be repeated while it polls
    answers = {name: store.lookup(ids) ...}               one call per store
    hit = coordinator.decide(chain, plan, answers, ...)   scheduler; may be repeated, changes nothing
    keep = coordinator.admit(chain, hit, tokens)          scheduler, once: the engine computes it now
    ...  the engine continues from hit.p_star; its adapter puts a snapshot of every snapshot row at
         each position of ``keep`` that the engine can offer ...
    for key in coordinator.stored(key): remove it         any thread, after each durable put
    coordinator.missed(key)                               any thread, after a get that missed
    keep = coordinator.finish(chain, computed_from, tokens)  scheduler, at the end of the request
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np

from ucm_core.coordinator.budget import CheckpointBudget, Place, budgeted_checkpoints
from ucm_core.coordinator.checkpoints import DEFAULT_CAPACITY, CheckpointDirectory
from ucm_core.coordinator.lookup import Answer, LookupPlan, grid_positions, plan_lookup
from ucm_core.coordinator.prefixes import PrefixSketch
from ucm_core.coordinator.resolve import HitPlan, Positions, resolve_hit
from ucm_core.coordinator.retention import Computation, DefaultRetention, RetentionPolicy
from ucm_core.identity import ContentChain, Ids
from ucm_core.spec.keyspace import KeySpace, SeededCoordinate, SnapshotKey
from ucm_core.spec.table import SpecTable

#: Ids that a request asks a snapshot row for beyond those that a directory names, over all coordinates
#: of the row; within these bounds per coordinate.
GRID_LOOKUPS = 4096
_POSITIONS = (128, 1024)

_NOWHERE: Positions = np.empty(0, np.int64)


class Coordinator:
    """See the module text. ``stored`` and ``missed`` may be called from any thread, all else from the
    scheduler's.

    ``policy``: which checkpoints to make. ``alignment``: the engine continues only from its multiples.
    ``directory_capacity``: entries per snapshot row. ``grid_lookups``: see :data:`GRID_LOOKUPS`; 0 asks
    for known positions alone, and gives up reuse after a restart and across machines.
    """

    def __init__(
        self,
        keys: KeySpace,
        *,
        policy: RetentionPolicy | None = None,
        alignment: int = 1,
        directory_capacity: int = DEFAULT_CAPACITY,
        grid_lookups: int = GRID_LOOKUPS,
    ) -> None:
        self.keys = keys
        self.table = keys.table
        self.policy: RetentionPolicy = DefaultRetention() if policy is None else policy
        self.alignment = alignment
        self.directories: Mapping[str, CheckpointDirectory] = {
            row.name: CheckpointDirectory(row, self.table.grain, directory_capacity)
            for row in self.table.snapshots
        }
        self._positions = _grid_bound(keys, grid_lookups)
        self._interval = _aligned_interval(self.table)
        self._prefixes = PrefixSketch() if self.table.snapshots else None
        self._lock = threading.Lock()
        limit = budgeted_checkpoints(self.table)
        self._budget = None if limit is None else CheckpointBudget(limit)
        self._missed = 0

    # -- before the request runs -------------------------------------------------------------------

    def plan(
        self,
        chain: ContentChain,
        *,
        local: int = 0,
        store_of: Callable[[SeededCoordinate], str] = lambda at: at.row.store,
    ) -> LookupPlan:
        """The ids that decide this request's hit, one batch per store; ``local``: tokens the engine has."""
        return plan_lookup(
            self.keys,
            chain,
            skip_tokens=local,
            positions=self._candidates(chain, local),
            store_of=store_of,
        )

    def decide(
        self,
        chain: ContentChain,
        plan: LookupPlan,
        answers: Mapping[str, Answer],
        *,
        tokens: int | None = None,
        local: int = 0,
        reserve: int = 1,
    ) -> HitPlan:
        """The hit, from one answer per store. ``tokens``: of the prompt (default: of the chain);
        ``local``, ``reserve``: as in :func:`resolve_hit`. Repeating it changes nothing."""
        votes = plan.votes(answers)
        return resolve_hit(
            self.table,
            chain.tokens if tokens is None else tokens,
            votes.present,
            votes.checkpoints,
            local=local,
            alignment=self.alignment,
            reserve=reserve,
        )

    def snapshots_at(self, chain: ContentChain, position: int) -> tuple[SnapshotKey, ...]:
        """The key of each snapshot row at ``position`` (on the grain, within the chain's whole links)."""
        if position <= 0 or position % self.table.grain:
            raise ValueError(
                f"position {position} is not on the grain of {self.table.grain} tokens"
            )
        link = chain.links[position // self.table.grain - 1].tobytes()
        return tuple(SnapshotKey(row.name, position, link) for row in self.table.snapshots)

    def heat(self, chain: ContentChain, hit: HitPlan) -> dict[str, Ids]:
        """Row -> ids that this hit uses, for a throttled ``touch``: the blocks it loads, the snapshots
        at ``p_star``."""
        used: dict[str, Ids] = {}
        for name, (start, stop) in hit.load.items():
            blocks = [self.keys.block_ids(at, chain, start, stop) for at in self.keys.of(name)]
            used[name] = np.concatenate(blocks)
        if hit.external:
            for key in self.snapshots_at(chain, hit.p_star) if self.table.snapshots else ():
                used[key.group] = self.keys.snapshot_ids(key)
        return used

    # -- while it runs, and at its end -------------------------------------------------------------

    def admit(self, chain: ContentChain, hit: HitPlan, tokens: int | None = None) -> Positions:
        """The engine computes the request from ``hit.p_star`` on, up to ``tokens`` (default: of the
        chain). Call once per request: it counts as an appearance of its prefix.

        Returns ascending positions at which every snapshot row shall keep a state.
        """
        if self._prefixes is None:
            return _NOWHERE
        shared = self._prefixes.shared(chain.links) * self.table.grain
        self._prefixes.add(chain.links)
        if hit.external and self._budget is not None:
            place = self._place(chain, hit.p_star)
            with self._lock:
                self._budget.use(place)
        end = chain.tokens if tokens is None else tokens
        return self._keep(Computation(hit.p_star, end, shared))

    def finish(
        self, chain: ContentChain, computed_from: int, tokens: int | None = None
    ) -> Positions:
        """The request ended after ``tokens`` tokens, generated ones included (default: of the chain).

        Returns the positions above ``computed_from`` to keep a state at, of what the engine still has.
        What was generated counts as seen: the next turn of a conversation shares it.
        """
        if self._prefixes is not None:
            self._prefixes.add(chain.links)
        end = chain.tokens if tokens is None else tokens
        return self._keep(Computation(computed_from, end))

    # -- what became of snapshots (any thread) -----------------------------------------------------

    def stored(self, key: SnapshotKey) -> tuple[SnapshotKey, ...]:
        """A put is durable on every coordinate. Returns keys to remove from the stores, because the
        budget prefers this one."""
        self.directories[key.group].add(key.position, key.link)
        if self._budget is None:
            return ()
        with self._lock:
            victim = self._budget.add((key.position, key.link))
        if victim is None:
            return ()
        gone = tuple(SnapshotKey(row.name, *victim) for row in self.table.snapshots)
        for each in gone:
            self.directories[each.group].discard(each.position, each.link)
        return gone

    def missed(self, key: SnapshotKey) -> None:
        """A get missed, or a lookup denied it: the snapshot is gone. The request recomputes."""
        self.directories[key.group].discard(key.position, key.link)
        with self._lock:
            self._missed += 1
            if self._budget is not None:
                self._budget.forget((key.position, key.link))

    def stats(self) -> dict[str, int]:
        """Counters and gauges, for metrics."""
        directories = self.directories.values()
        with self._lock:
            return {
                "checkpoint_directory_entries": sum(len(d) for d in directories),
                "checkpoint_directory_forgotten_total": sum(d.forgotten for d in directories),
                "checkpoints_missed_total": self._missed,
                "checkpoints_evicted_total": 0 if self._budget is None else self._budget.evicted,
            }

    # -- internals ---------------------------------------------------------------------------------

    def _candidates(self, chain: ContentChain, above: int) -> dict[str, Positions]:
        """Where to ask every snapshot row: what any directory knows, and the grid. The same positions
        for all rows, since only one that they have in common is of use."""
        if not self.table.snapshots:
            return {}
        known = [directory.positions(chain) for directory in self.directories.values()]
        grid = _NOWHERE
        if self._positions:
            step = self.table.snapshot_grid
            grid = grid_positions(step, chain.tokens, above, self._positions, self._interval)
        where = np.unique(np.concatenate([*known, grid]))
        where = where[(where > above) & (where < chain.tokens)]
        return {row.name: where for row in self.table.snapshots}

    def _keep(self, work: Computation) -> Positions:
        if not self.table.snapshots:
            return _NOWHERE
        return self.policy.positions(self.table, work)

    def _place(self, chain: ContentChain, position: int) -> Place:
        return position, chain.links[position // self.table.grain - 1].tobytes()


def _grid_bound(keys: KeySpace, ids: int) -> int:
    """Positions to ask for per request, so that a row of many coordinates does not cost many lookups."""
    coordinates = max((len(keys.of(row.name)) for row in keys.table.snapshots), default=1)
    low, high = _POSITIONS
    return min(max(ids // coordinates, low), high) if ids else 0


def _aligned_interval(table: SpecTable) -> int | None:
    """The smallest retention interval whose multiples are all on the checkpoint grid, if there is one."""
    intervals = [row.retention.interval for row in table.snapshots if row.retention.interval]
    aligned = [each for each in intervals if each % table.checkpoint_grid == 0]
    return min(aligned, default=None)
