"""Every rank a process of its own, as deployments have them: own memory, own stores, one directory.

Sums over tensor-parallel ranks, pages of context-parallel ranks and activations between stages travel
through pipes. Every wait is bounded: a rank that dies or hangs ends the run with an error that names it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any

from ucm_reference.batch import micros
from ucm_reference.connector import Port, WorkerConnector
from ucm_reference.fixed import Array
from ucm_reference.memory import Sizes
from ucm_reference.model import Model
from ucm_reference.scheduler import Answers, Step
from ucm_reference.stage import Activations, Stage
from ucm_reference.topology import Rank, Topology

#: Longest any rank waits for another one.
PATIENCE_S = 60.0

#: Runs in the rank's process: its connector, and what to call at the end.
Connect = Callable[[Rank], tuple[WorkerConnector, Callable[[], None]]]


def receive(pipe: Connection, who: str) -> Any:
    """The next message; RuntimeError when ``who`` sends nothing, or is gone."""
    try:
        if pipe.poll(PATIENCE_S):
            return pipe.recv()
    except EOFError:
        raise RuntimeError(f"{who} is gone") from None
    raise RuntimeError(f"{who} sent nothing for {PATIENCE_S:.0f} s")


class PipeComm:
    """Sums over the ranks of a group in which each is a process: the first adds, the others send and wait.

    ``peers``: pipes to all others on the first rank, to the first one elsewhere.
    """

    def __init__(self, kind: str, number: int, peers: Sequence[Connection]) -> None:
        self._kind, self._number, self._peers = kind, number, peers

    def sum(self, part: Array) -> Array:
        if self._number:
            self._peers[0].send(part)
            total: Array = receive(self._peers[0], f"{self._kind} rank 0")
            return total
        total = part
        for i, peer in enumerate(self._peers):
            total = total + receive(peer, f"{self._kind} rank {i + 1}")
        for peer in self._peers:
            peer.send(total)
        return total


class RankComm:
    """One rank's: with its tensor-parallel group, and with its context-parallel group."""

    def __init__(self, rank: Rank, tp: Sequence[Connection], cp: Sequence[Connection]) -> None:
        self._tp = PipeComm("tensor-parallel", rank.tp, tp)
        self._cp = PipeComm("context-parallel", rank.cp, cp)

    def sum(self, part: Array) -> Array:
        return self._tp.sum(part)

    def join(self, found: Array) -> Array:
        return self._cp.sum(found)


@dataclass(slots=True)
class _Pipes:
    """One rank's pipes to others: the groups' (see :class:`PipeComm`), and the stages' before and after."""

    tp: list[Connection] = field(default_factory=list)
    cp: list[Connection] = field(default_factory=list)
    before: Connection | None = None
    after: Connection | None = None


def _connected(topology: Topology, context: SpawnContext) -> dict[Rank, _Pipes]:
    pipes = {rank: _Pipes() for rank in topology.ranks()}
    for rank, mine in pipes.items():
        if rank.tp:
            ours, theirs = context.Pipe()
            pipes[replace(rank, tp=0)].tp.append(ours)
            mine.tp.append(theirs)
        if rank.cp:
            ours, theirs = context.Pipe()
            pipes[replace(rank, cp=0)].cp.append(ours)
            mine.cp.append(theirs)
        if rank.pp:
            mine.before, pipes[replace(rank, pp=rank.pp - 1)].after = context.Pipe(duplex=False)
    return pipes


class ProcessExecutor:
    """``connect``: picklable."""

    def __init__(
        self, model: Model, topology: Topology, sizes: Sizes, *, connect: Connect, short: int = 1
    ) -> None:
        topology.check(model)
        context = multiprocessing.get_context("spawn")
        others = _connected(topology, context)
        self._ranks = topology.ranks()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in self._ranks:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=((model, topology, sizes, short, rank), theirs, others[rank], connect),
                name=f"rank-{rank.pp}-{rank.cp}-{rank.tp}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, step: Step, message: Any) -> tuple[Answers, list[Any]]:
        step.freed, step.taken = {}, {}
        for pipe in self._pipes:
            pipe.send((step, message))
        answers: Answers = {}
        reports = []
        for rank, pipe in zip(self._ranks, self._pipes, strict=True):
            found, report = receive(pipe, f"{rank}")
            answers = found or answers
            reports.append(report)
        return answers, reports

    def close(self) -> None:
        """Ask every rank to end; one that does not is killed."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # gone already
                pipe.send(None)
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)
        for pipe in self._pipes:
            pipe.close()


def _serve(
    what: tuple[Model, Topology, Sizes, int, Rank],
    control: Connection,
    pipes: _Pipes,
    connect: Connect,
) -> None:
    """One rank's process: steps until told to end."""
    model, topology, sizes, short, rank = what
    stage = Stage(
        model,
        topology,
        rank.pp,
        sizes,
        range(rank.tp, rank.tp + 1),
        RankComm(rank, pipes.tp, pipes.cp),
        range(rank.cp, rank.cp + 1),
    )
    connector, end = connect(rank)
    connector.register(rank, stage.memory.of_rank(rank))
    port = Port(connector, stage.layers)
    try:
        while (work := control.recv()) is not None:
            step, message = work
            port.start_load(message)
            answers: Answers = {}
            if step.spans:
                batch = micros(step.spans, topology, sizes.page_tokens, short)
                given: Sequence[Activations] = ()
                if pipes.before is not None:
                    given = receive(pipes.before, f"stage {rank.pp - 1}")
                made = stage.run(batch, given, [port])
                if pipes.after is not None:
                    pipes.after.send(made)
                elif rank.tp == rank.cp == 0:
                    answers = stage.sample(batch, made)
            control.send((answers, port.wait_for_save(idle=not step.spans)))
    finally:
        port.close()
        end()
