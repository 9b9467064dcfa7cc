"""The engine: requests in, tokens out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ucm_reference.connector import News, SchedulerConnector
from ucm_reference.drafts import Drafter
from ucm_reference.lockstep import Executor
from ucm_reference.memory import Sizes
from ucm_reference.model import Model
from ucm_reference.request import Request
from ucm_reference.scheduler import Limits, Scheduler

#: Steps in a row that bring nothing before ``run`` gives up: a lost load must not hang a caller.
_STUCK_S = 60.0


class Engine:
    """Owns executor and connector: call :meth:`close`, or use it as a context manager. One thread."""

    def __init__(
        self,
        model: Model,
        executor: Executor,
        *,
        sizes: Sizes,
        limits: Limits | None = None,
        connector: SchedulerConnector | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler = Scheduler(model, sizes, limits or Limits(), connector, drafter)
        self.executor = executor
        self.connector = connector
        self.steps = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> list[Request]:
        """Run one step; returns the requests that ended in it."""
        step = self.scheduler.schedule()
        message = self.connector.build(step.view) if self.connector is not None else None
        answers, reports = self.executor.run(step, message)
        news = self.connector.update(reports) if self.connector is not None else News()
        self.steps += 1
        ended = self.scheduler.update(answers, news)
        now, cpu = time.perf_counter(), time.process_time()
        for request in (*self.scheduler.running, *ended):
            if request.first_token_s is None and request.digests:
                request.first_token_s = now - request.added_at
                request.first_token_cpu_s = cpu - request.added_cpu
        return ended

    def run(self, requests: Iterable[Request]) -> list[Request]:
        """Add requests and step until nothing is left; returns them in the order given."""
        given: Sequence[Request] = list(requests)
        for request in given:
            self.scheduler.add(request)
        self.drain()
        return list(given)

    def drain(self) -> None:
        """Step until nothing waits, runs, or is held. Raises RuntimeError where nothing moves."""
        moved = time.monotonic()
        before = None
        while self.scheduler.busy:
            self.step()
            now = self.scheduler.progress()
            if now != before:
                before, moved = now, time.monotonic()
            elif time.monotonic() - moved > _STUCK_S:
                raise RuntimeError(f"no progress for {_STUCK_S:.0f} s: {now}")

    def close(self) -> None:
        self.executor.close()
        if self.connector is not None:
            self.connector.close()
