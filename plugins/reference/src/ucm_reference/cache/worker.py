"""One rank: moves the bytes of its coordinates, and reports what became of every operation, once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.owners import segment_owner, writer_of
from ucm_core.errors import UcmError
from ucm_core.identity.chain import object_ids
from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.spec import Kind, SeededCoordinate
from ucm_core.store.contract import BlockStore, Status, Task
from ucm_core.store.snapshot import SnapshotStore, SnapshotTask
from ucm_reference.cache.messages import Bad, Message, Report, RowPart, StatePart, Transfer
from ucm_reference.cache.placement import Lane, Placement, lanes
from ucm_reference.memory import Tensor
from ucm_reference.topology import Rank

_log = RateLimitedLogger(logging.getLogger("ucm.reference"))

#: Longest an idle step waits for the oldest load.
IDLE_WAIT_S = 0.002

StateIds = Callable[[SeededCoordinate, StatePart], npt.NDArray[np.uint8]]


@dataclass(slots=True)
class _Part:
    """One lane's share: rows ``index`` of the operation's part; ``task`` None when it was refused."""

    lane: Lane
    index: npt.NDArray[np.int64]
    task: Task | SnapshotTask | None


@dataclass(slots=True)
class _Open:
    op: Transfer
    parts: list[_Part]
    copied: bool = False


@dataclass(slots=True)
class _State:
    loads: dict[int, _Open] = field(default_factory=dict)
    saves: dict[int, _Open] = field(default_factory=dict)


class Worker:
    """See the module text; the connector of one rank. ``stores``: by the names of the placement.

    Loads are *async direct*: a request runs when its data is verified in place. Saves are issued in bulk
    when the step's last layer has run, and of windowed rows the copies are awaited at once, because
    the engine may give their pages away before its next step.
    """

    def __init__(
        self,
        placement: Placement,
        stores: Mapping[str, BlockStore],
        states: Mapping[str, SnapshotStore],
        state_ids: StateIds,
        timeout_s: float = 30.0,
    ) -> None:
        self._placement = placement
        self._stores, self._states = stores, states
        self._state_ids = state_ids
        self._timeout_s = timeout_s
        self._lanes: list[Lane] = []
        self._cp = 0
        self._message = Message()
        self._open = _State()
        #: Layer calls seen, for tests: each layer is waited for and saved once per pass.
        self.layer_calls = 0

    def register(self, rank: Rank, tensors: Sequence[Tensor]) -> None:
        self._cp = rank.cp
        made = lanes(self._placement, rank, tensors)
        # Sidecars first: they have no say in a hit, and should be there when their source is found.
        self._lanes = sorted(made, key=lambda lane: lane.at.row.kind is not Kind.SIDECAR)

    # -- the four calls ------------------------------------------------------------------------------

    def start_load(self, message: Message) -> None:
        self._message = message
        if message.preempted:
            self._fence(set(message.preempted))
        for op in message.loads:
            self._open.loads[op.op_id] = _Open(op, self._submit(op, load=True))

    def wait_for_layer(self, layer: int) -> None:
        """Nothing to wait for: requests run when their loads have ended."""
        self.layer_calls += 1

    def save_layer(self, layer: int) -> None:
        """Bulk saves: everything is issued in ``wait_for_save``."""

    def wait_for_save(self) -> Report:
        for op in self._message.saves:
            opened = _Open(op, self._submit(op, load=False))
            self._open.saves[op.op_id] = opened
            for part in opened.parts:
                if part.lane.at.row.window is not None and part.task is not None:
                    part.task.wait(self._timeout_s)
        if self._message.idle:
            self._await_one()
        return self._poll()

    def close(self) -> None:
        """Fence what runs; the stores belong to the deployment."""
        for opened in (*self._open.loads.values(), *self._open.saves.values()):
            for part in opened.parts:
                if part.task is not None and not part.task.check():
                    part.task.cancel()
        self._open = _State()

    # -- submitting ----------------------------------------------------------------------------------

    def _submit(self, op: Transfer, *, load: bool) -> list[_Part]:
        parts = []
        for lane in self._lanes:
            row = lane.at.row
            if row.kind is Kind.SNAPSHOT:
                if op.state is not None:
                    parts += self._submit_state(lane, op.state, load)
            elif row.name in op.rows:
                parts += self._submit_blocks(lane, op.rows[row.name], load)
        return parts

    def _submit_blocks(self, lane: Lane, part: RowPart, load: bool) -> list[_Part]:
        """The blocks whose pages this rank owns; of content equal on several ranks its share to write."""
        topology, row = self._placement.topology, lane.at.row
        run = topology.segment // row.block_tokens
        mine = segment_owner(part.blocks, topology.cp, run) == self._cp
        if not load:
            mine &= writer_of(part.blocks, lane.replicas) == lane.replica
        index = np.flatnonzero(mine)
        if not len(index):
            return []
        chosen = part.only(mine)
        ids = np.repeat(object_ids(lane.at.seed, chosen.links), lane.shards, axis=0)
        shards = np.tile(np.arange(lane.shards, dtype=np.uint32), len(index))
        store = self._stores[lane.store]
        try:
            move = store.load if load else store.dump
            task: Task | None = move(ids, shards, lane.addresses(chosen.pages))
        except (UcmError, ValueError):
            task = None
        return [_Part(lane, index, task)]

    def _submit_state(self, lane: Lane, state: StatePart, load: bool) -> list[_Part]:
        store = self._states[lane.store]
        if not load:
            grid = self._placement.table.checkpoint_grid
            turn = np.array([state.position // grid], np.int64)
            if int(writer_of(turn, lane.replicas)[0]) != lane.replica:
                return []
        ids = self._state_ids(lane.at, state)
        where = lane.addresses(np.array([[state.slot]], np.int64)).reshape(1, lane.shards, 1)
        try:
            task: SnapshotTask | None = (store.get if load else store.put)(ids, where)
        except (UcmError, ValueError):
            task = None
        return [_Part(lane, np.zeros(1, np.int64), task)]

    def _fence(self, requests: set[str]) -> None:
        """The engine takes these requests' memory: copies out of it end now, well or as cancelled."""
        for opened in self._open.saves.values():
            if opened.op.request_id in requests and not opened.copied:
                for part in opened.parts:
                    if part.task is not None:
                        part.task.wait(1.0)

    # -- what became of it ---------------------------------------------------------------------------

    def _await_one(self) -> None:
        until = time.monotonic() + IDLE_WAIT_S
        for opened in (*self._open.loads.values(), *self._open.saves.values()):
            for part in opened.parts:
                if part.task is not None:
                    part.task.check(max(0.0, until - time.monotonic()))
            return

    def _poll(self) -> Report:
        report = Report()
        for op_id, opened in list(self._open.loads.items()):
            if all(part.task is None or part.task.check() for part in opened.parts):
                del self._open.loads[op_id]
                report.loaded[op_id] = _bad(opened.parts, durable=False)
        for op_id, opened in list(self._open.saves.items()):
            tasks = [part.task for part in opened.parts if part.task is not None]
            if not opened.copied and all(task.check() for task in tasks):
                opened.copied = True
                report.copied.append(op_id)
            if opened.copied and not any(
                (task.durable_results() == Status.PENDING).any() for task in tasks
            ):
                del self._open.saves[op_id]
                report.ended[op_id] = _bad(opened.parts, durable=True)
        return report


def _tell(row: str, part: _Part, *, durable: bool) -> None:
    """One line a failure, rate-limited: which row, how many, and what the store said."""
    said = "refused"
    if part.task is not None:
        results = part.task.durable_results() if durable else part.task.wait(0.0)
        said = ", ".join(Status(int(s)).name.lower() for s in np.unique(results) if s != Status.OK)
    what = "save" if durable else "load"
    _log.warning(
        f"{what} failed", "%s of row %s failed (%d blocks): %s", what, row, len(part.index), said
    )


def _bad(parts: Sequence[_Part], *, durable: bool) -> Bad:
    """What did not work, by row."""
    bad = Bad()
    for part in parts:
        row = part.lane.at.row
        if part.task is None:
            failed = np.ones(len(part.index), np.bool_)
        else:
            results = part.task.durable_results() if durable else part.task.wait(0.0)
            failed = (results.reshape(len(part.index), -1) != Status.OK).any(axis=1)
        if failed.any():
            _tell(row.name, part, durable=durable)
            if row.kind is Kind.SNAPSHOT:
                bad.merge(Bad(state={row.name}))
            else:
                bad.merge(Bad({row.name: part.index[failed]}))
    return bad
