"""Every rank a process of its own, as deployments have them: own memory, own stores, one directory.

Sums over tensor-parallel ranks and activations between stages travel through pipes. Every wait is bounded:
a rank that dies or hangs ends the run with an error that names it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
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
    """Sums over the tensor-parallel ranks of a stage: the first adds, the others send and wait.
    ``peers``: pipes to all others on the first rank, to the first one elsewhere."""

    def __init__(self, tp: int, peers: Sequence[Connection]) -> None:
        self._tp, self._peers = tp, peers

    def sum(self, part: Array) -> Array:
        if self._tp:
            self._peers[0].send(part)
            total: Array = receive(self._peers[0], "tensor-parallel rank 0")
            return total
        total = part
        for i, peer in enumerate(self._peers):
            total = total + receive(peer, f"tensor-parallel rank {i + 1}")
        for peer in self._peers:
            peer.send(total)
        return total


class ProcessExecutor:
    """``connect``: picklable. Context parallelism is refused: its ranks share one process here."""

    def __init__(
        self, model: Model, topology: Topology, sizes: Sizes, *, connect: Connect, short: int = 1
    ) -> None:
        topology.check(model)
        if topology.cp > 1:
            raise ValueError("context-parallel ranks share one process: use the lockstep executor")
        context = multiprocessing.get_context("spawn")
        peers: dict[Rank, list[Connection]] = {rank: [] for rank in topology.ranks()}
        before: dict[Rank, Connection] = {}
        after: dict[Rank, Connection] = {}
        for rank in topology.ranks():
            if rank.tp:
                ours, theirs = context.Pipe()
                peers[Rank(rank.pp, 0, 0)].append(ours)
                peers[rank].append(theirs)
            if rank.pp:
                before[rank], after[Rank(rank.pp - 1, 0, rank.tp)] = context.Pipe(duplex=False)
        self._ranks = topology.ranks()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in self._ranks:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    (model, topology, sizes, short, rank),
                    (theirs, peers[rank], before.get(rank), after.get(rank)),
                    connect,
                ),
                name=f"rank-{rank.pp}-{rank.tp}",
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
    pipes: tuple[Connection, Sequence[Connection], Connection | None, Connection | None],
    connect: Connect,
) -> None:
    """One rank's process: steps until told to end."""
    model, topology, sizes, short, rank = what
    control, peers, before, after = pipes
    stage = Stage(
        model, topology, rank.pp, sizes, range(rank.tp, rank.tp + 1), PipeComm(rank.tp, peers)
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
                if before is not None:
                    given = receive(before, f"stage {rank.pp - 1}")
                made = stage.run(batch, given, [port])
                if after is not None:
                    after.send(made)
                elif rank.tp == 0:
                    answers = stage.sample(batch, made)
            control.send((answers, port.wait_for_save(idle=not step.spans)))
    finally:
        port.close()
        end()
