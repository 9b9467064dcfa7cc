"""All ranks in one process, in lockstep: every layer computes for all tensor-parallel ranks at once.

Each rank has memory and a connector of its own. The calls in which connectors work (``start_load``,
``wait_for_save``) run on one thread per rank, at the same time, as they would in processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ucm_reference.batch import micros
from ucm_reference.connector import Port, WorkerConnector
from ucm_reference.memory import Sizes
from ucm_reference.model import Model
from ucm_reference.scheduler import Answers, Step
from ucm_reference.stage import Activations, Stage
from ucm_reference.topology import Rank, Topology


class Executor(Protocol):
    """Runs steps on the ranks."""

    def run(self, step: Step, message: Any) -> tuple[Answers, list[Any]]:
        """Answers of the last stage, and one connector report per rank (none without connectors)."""

    def close(self) -> None: ...


class LockstepExecutor:
    """``connect``: makes a rank's connector; None: no cache. ``poison``: overwrite freed pages."""

    def __init__(
        self,
        model: Model,
        topology: Topology,
        sizes: Sizes,
        *,
        connect: Callable[[Rank], WorkerConnector] | None = None,
        short: int = 1,
        poison: bool = False,
    ) -> None:
        topology.check(model)
        self._topology, self._sizes = topology, sizes
        self._short, self._poison = short, poison
        self.stages = [Stage(model, topology, i, sizes) for i in range(topology.pp)]
        self._ports: list[list[Port]] = [[] for _ in self.stages]
        self._threads: list[ThreadPoolExecutor] = []
        if connect is not None:
            for rank in topology.ranks():
                stage = self.stages[rank.pp]
                connector = connect(rank)
                connector.register(rank, stage.memory.of_rank(rank))
                self._ports[rank.pp].append(Port(connector, stage.layers))
                self._threads.append(ThreadPoolExecutor(1, f"rank-{rank.pp}-{rank.cp}-{rank.tp}"))

    @property
    def _all(self) -> list[Port]:
        return [port for ports in self._ports for port in ports]

    def _each(self, call: Callable[[Port], Any]) -> list[Any]:
        """``call`` on every rank's thread, at the same time."""
        futures = [
            thread.submit(call, port) for thread, port in zip(self._threads, self._all, strict=True)
        ]
        return [future.result() for future in futures]

    def run(self, step: Step, message: Any) -> tuple[Answers, list[Any]]:
        self._spoil(step.freed)
        self._each(lambda port: port.start_load(message))
        self._spoil(step.taken)
        answers: Answers = {}
        if step.spans:
            batch = micros(step.spans, self._topology, self._sizes.page_tokens, self._short)
            flow: Sequence[Activations] = ()
            for stage, ports in zip(self.stages, self._ports, strict=True):
                flow = stage.run(batch, flow, ports)
            answers = self.stages[-1].sample(batch, flow)
        idle = not step.spans
        return answers, self._each(lambda port: port.wait_for_save(idle=idle))

    def _spoil(self, freed: Mapping[str, Sequence[int]]) -> None:
        if self._poison:
            for stage in self.stages:
                for group, blocks in freed.items():
                    stage.memory.poison(group, blocks)

    def close(self) -> None:
        for port in self._all:
            port.close()
        for thread in self._threads:
            thread.shutdown()
