"""An engine with a cache, in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ucm_core.registry import Role
from ucm_reference.cache.deployment import Deployment, open_deployment
from ucm_reference.cache.scheduler import SchedulerSide
from ucm_reference.connector import WorkerConnector
from ucm_reference.drafts import Drafter
from ucm_reference.engine import Engine
from ucm_reference.lockstep import Executor, LockstepExecutor
from ucm_reference.memory import Sizes
from ucm_reference.model import Model
from ucm_reference.processes import ProcessExecutor
from ucm_reference.scheduler import Limits
from ucm_reference.topology import Rank, Topology

#: Longest ``drain`` waits for the last saves; the store's own deadline is shorter by default.
SETTLE_S = 60.0


class CachedEngine(Engine):
    """An engine that owns its deployment. ``side``: the adapter's scheduler side, with its counters."""

    def __init__(self, deployment: Deployment, side: SchedulerSide, **options: Any) -> None:
        super().__init__(deployment.model, connector=side, **options)
        self.deployment, self.side = deployment, side

    def drain(self) -> None:
        """As any engine, and until what was saved is stored, or has failed."""
        super().drain()
        deadline = time.monotonic() + SETTLE_S
        while self.side.pending()["saves"] and time.monotonic() < deadline:
            self.step()

    def close(self) -> None:
        super().close()
        self.deployment.close()


@dataclass(frozen=True, slots=True)
class RankOpener:
    """Opens one rank's connector in the rank's own process."""

    model: Model
    topology: Topology
    sizes: Sizes
    options: dict[str, Any]

    def __call__(self, rank: Rank) -> tuple[WorkerConnector, Callable[[], None]]:
        deployment = open_deployment(self.model, self.topology, self.sizes, self.options)
        return deployment.worker(rank), deployment.close


def cached_engine(
    model: Model,
    topology: Topology | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    sizes: Sizes | None = None,
    limits: Limits | None = None,
    drafter: Drafter | None = None,
    poison: bool = False,
    processes: bool = False,
) -> CachedEngine:
    """All ranks in this process, in lockstep; with ``processes`` each in one of its own. ``options``: UCM's
    configuration keys. ``poison``: overwrite freed memory (lockstep)."""
    topology, sizes = topology or Topology(), sizes or Sizes()
    role: Role = "scheduler" if processes else "worker"
    deployment = open_deployment(model, topology, sizes, options, role=role)
    short = 1 if drafter is None else drafter.limit + 1
    try:
        grid = deployment.placement.table.checkpoint_grid
        given = limits or Limits()
        side = deployment.scheduler_side()
        executor: Executor
        if processes:
            opener = RankOpener(model, topology, sizes, dict(options or {}))
            executor = ProcessExecutor(model, topology, sizes, connect=opener, short=short)
        else:
            executor = LockstepExecutor(
                model, topology, sizes, connect=deployment.worker, short=short, poison=poison
            )
        bounded = Limits(given.tokens, given.requests, grid)
        return CachedEngine(
            deployment, side, executor=executor, sizes=sizes, limits=bounded, drafter=drafter
        )
    except BaseException:
        deployment.close()
        raise
