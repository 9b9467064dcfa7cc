"""One rank: moves the bytes of its coordinates, and reports what became of every operation, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.layers import LayerLoads, LayerSaves, LookAhead, RowTransfer
from ucm_core.adapter.owners import segment_owner, writer_of
from ucm_core.adapter.transfer import BlockTransfer
from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.identity.chain import object_ids
from ucm_core.spec import TARGET, Kind, SeededCoordinate
from ucm_core.store.contract import BlockStore, CommitMode
from ucm_core.store.snapshot import SnapshotStore
from ucm_reference.cache.messages import Bad, Message, Report, StatePart, Transfer
from ucm_reference.cache.modes import Modes
from ucm_reference.cache.parts import Part
from ucm_reference.cache.placement import Lane, Placement, lanes
from ucm_reference.memory import Tensor
from ucm_reference.topology import Rank

#: Longest an idle step waits for the oldest load.
IDLE_WAIT_S = 0.002
#: Longest the engine waits for copies out of memory that it takes back.
RECLAIM_WAIT_S = 1.0

StateIds = Callable[[SeededCoordinate, StatePart], npt.NDArray[np.uint8]]


@dataclass(slots=True)
class _Open:
    op: Transfer
    parts: list[Part]
    copied: bool = False


@dataclass(slots=True)
class _State:
    loads: dict[int, _Open] = field(default_factory=dict)
    saves: dict[int, _Open] = field(default_factory=dict)


class Worker:
    """See the module text; the connector of one rank. ``stores``: by the names of the placement.

    Of windowed rows the copies are awaited at the end of the step that saves them, because the engine may
    give their pages away before its next step.
    """

    def __init__(
        self,
        placement: Placement,
        stores: Mapping[str, BlockStore],
        states: Mapping[str, SnapshotStore],
        state_ids: StateIds,
        timeout_s: float = 30.0,
        modes: Modes | None = None,
    ) -> None:
        self._placement = placement
        self._stores, self._states = stores, states
        self._state_ids = state_ids
        self._timeout_s = timeout_s
        self._modes = modes or Modes()
        self._commit = CommitMode.EXPLICIT if self._modes.held_back else CommitMode.AUTO
        self._look_ahead = LookAhead(self._modes.look_ahead)
        self._lanes: list[Lane] = []
        self._cp = 0
        self._message = Message()
        self._open = _State()
        self._units: UnitMap | None = None
        self._loading: LayerLoads | None = None
        self._saving: LayerSaves | None = None
        #: The layer that computed last: it may compute once more, for the step's other micro-batch.
        self._computed: int | None = None
        #: Layer calls seen, for tests: each layer is waited for and saved once per pass.
        self.layer_calls = 0

    def register(self, rank: Rank, tensors: Sequence[Tensor]) -> None:
        self._cp = rank.cp
        made = lanes(self._placement, rank, tensors)
        # Sidecars first: they have no say in a hit, and should be there when their source is found.
        self._lanes = sorted(made, key=lambda lane: lane.at.row.kind is not Kind.SIDECAR)
        if self._modes.layered_saves:
            stage = self._placement.topology.stages(self._placement.model)[rank.pp]
            self._units = self._placement.unit_map(stage)

    # -- the four calls ------------------------------------------------------------------------------

    def start_load(self, message: Message) -> None:
        self._message = message
        self._computed = None
        if message.preempted:
            self._fence(set(message.preempted))
        self._settle(message)
        loads = [self._prepare(op, self._open.loads, load=True) for op in message.loads]
        if self._modes.layered_loads and loads:
            assert self._units is not None
            self._loading = LayerLoads(self._units, _moved(loads), self._look_ahead)
        else:
            for opened in loads:
                for part in opened.parts:
                    part.load()
        if self._units is not None and message.saves:
            saves = [self._prepare(op, self._open.saves, load=False) for op in message.saves]
            self._saving = LayerSaves(self._units, _moved(saves), self._commit)

    def wait_for_layer(self, layer: int) -> None:
        """Until what the layer reads is there or has failed; requests whose loads are not by layer run when
        they have ended."""
        self.layer_calls += 1
        if self._loading is not None:
            self._loading.wait(LayerKey(TARGET, layer))
        if self._computed != layer:
            self._save_computed()

    def save_layer(self, layer: int) -> None:
        """The engine calls a layer once a micro-batch: its bytes are final when the next layer begins."""
        self._computed = layer

    def _save_computed(self) -> None:
        if self._saving is not None and self._computed is not None:
            self._saving.save(LayerKey(TARGET, self._computed))
        self._computed = None

    def wait_for_save(self) -> Report:
        if self._loading is not None:
            self._loading.finish()
            self._loading = None
        if self._saving is not None:
            self._save_computed()
            self._saving.finish()
            self._saving = None
        elif self._units is None:
            for op in self._message.saves:
                for part in self._prepare(op, self._open.saves, load=False).parts:
                    part.dump(self._commit)
        for op in self._message.saves:
            for part in self._open.saves[op.op_id].parts:
                if part.lane.at.row.window is not None:
                    part.wait(self._timeout_s)
        if self._message.idle:
            self._await_one()
        return self._poll()

    def close(self) -> None:
        """Fence what runs; the stores belong to the deployment."""
        for opened in (*self._open.loads.values(), *self._open.saves.values()):
            for part in opened.parts:
                if not part.is_over():
                    part.fence()
        self._open = _State()

    # -- what this rank moves of an operation ----------------------------------------------------------

    def _prepare(self, op: Transfer, into: dict[int, _Open], *, load: bool) -> _Open:
        parts = []
        for lane in self._lanes:
            row = lane.at.row
            if row.kind is Kind.SNAPSHOT:
                if op.state is not None:
                    parts += self._state(lane, op.state, op.attempt, load)
            elif row.name in op.rows:
                parts += self._blocks(lane, op, load)
        into[op.op_id] = opened = _Open(op, parts)
        return opened

    def _blocks(self, lane: Lane, op: Transfer, load: bool) -> list[Part]:
        """The blocks whose pages this rank owns; of content equal on several ranks its share to write."""
        topology, row = self._placement.topology, lane.at.row
        part = op.rows[row.name]
        run = topology.segment // row.block_tokens
        mine = segment_owner(part.blocks, topology.cp, run) == self._cp
        if not load:
            attempt = op.attempt % lane.replicas
            mine &= writer_of(part.blocks, lane.replicas, attempt) == lane.replica
        index = np.flatnonzero(mine)
        if not len(index):
            return []
        chosen = part.only(mine)
        return [self._part(lane, index, object_ids(lane.at.seed, chosen.links), chosen.pages)]

    def _state(self, lane: Lane, state: StatePart, attempt: int, load: bool) -> list[Part]:
        if not load:
            grid = self._placement.table.checkpoint_grid
            turn = np.array([state.position // grid], np.int64)
            if int(writer_of(turn, lane.replicas, attempt % lane.replicas)[0]) != lane.replica:
                return []
        pages = np.array([[state.slot]], np.int64)
        return [self._part(lane, np.zeros(1, np.int64), self._state_ids(lane.at, state), pages)]

    def _part(
        self,
        lane: Lane,
        index: npt.NDArray[np.int64],
        ids: npt.NDArray[np.uint8],
        pages: npt.NDArray[np.int64],
    ) -> Part:
        addresses = lane.addresses(pages).reshape(len(ids), lane.shards, lane.pieces)
        transfer = BlockTransfer(self._stores[lane.store], ids, addresses)
        row = lane.at.row
        states = self._states[lane.store] if row.kind is Kind.SNAPSHOT else None
        return Part(lane, index, RowTransfer(row.name, transfer), states)

    # -- what the engine takes back, and what was held back --------------------------------------------

    def _fence(self, requests: set[str]) -> None:
        """The engine takes these requests' memory: copies out of it end now, well or as cancelled."""
        for opened in self._open.saves.values():
            if opened.op.request_id in requests and not opened.copied:
                for part in opened.parts:
                    part.wait(RECLAIM_WAIT_S)

    def _settle(self, message: Message) -> None:
        """What earlier steps saved and held back: published, or thrown away."""
        for op_id in message.commits:
            for part in self._parts_of(op_id):
                part.publish()
        for op_id in message.discards:
            for part in self._parts_of(op_id):
                part.discard()

    def _parts_of(self, op_id: int) -> Sequence[Part]:
        opened = self._open.saves.get(op_id)
        return opened.parts if opened is not None else ()

    # -- what became of it ---------------------------------------------------------------------------

    def _await_one(self) -> None:
        until = time.monotonic() + IDLE_WAIT_S
        for opened in (*self._open.loads.values(), *self._open.saves.values()):
            for part in opened.parts:
                part.is_over(max(0.0, until - time.monotonic()))
            return

    def _poll(self) -> Report:
        report = Report()
        for op_id, opened in list(self._open.loads.items()):
            if all(part.is_over() for part in opened.parts):
                del self._open.loads[op_id]
                report.loaded[op_id] = _bad(opened.parts, durable=False)
        for op_id, opened in list(self._open.saves.items()):
            if not opened.copied and all(part.is_over() for part in opened.parts):
                opened.copied = True
                report.copied.append(op_id)
            if opened.copied and all(part.is_answered() for part in opened.parts):
                del self._open.saves[op_id]
                report.ended[op_id] = _bad(opened.parts, durable=True)
        return report


def _moved(opened: Sequence[_Open]) -> list[RowTransfer]:
    return [part.moved for each in opened for part in each.parts]


def _bad(parts: Sequence[Part], *, durable: bool) -> Bad:
    """What did not work, by row."""
    bad = Bad()
    for part in parts:
        failed = part.failed(durable=durable)
        if failed.any():
            name = part.lane.at.row.name
            if part.states is not None:
                bad.merge(Bad(state={name}))
            else:
                bad.merge(Bad({name: part.index[failed]}))
    return bad
