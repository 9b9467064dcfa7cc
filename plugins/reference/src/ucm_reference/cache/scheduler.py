"""Scheduler side: hits from the coordinator, loads into what the engine allocated, saves of what it
computed. One thread; touches no byte of KV."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.tracker import RequestTracker
from ucm_core.coordinator import Coordinator, HitPlan, Votes, resolve_hit
from ucm_core.identity import ChainExtra, ContentChain
from ucm_core.spec import STORED, GroupSpec, Kind, SnapshotKey
from ucm_core.store.contract import BlockStore
from ucm_core.store.snapshot import SnapshotStore
from ucm_reference.cache.messages import Bad, Message, Report, RowPart, StatePart, Transfer
from ucm_reference.cache.modes import Modes, continues_anywhere
from ucm_reference.cache.placement import Placement
from ucm_reference.connector import News, StepView
from ucm_reference.request import Phase, Request

#: How long an answer is reused while the engine asks again for a waiting request.
ANSWER_LIFE_S = 0.2
#: Blocks and states that could not be loaded, remembered until they are stored anew; oldest out.
BAD_LIMIT = 65_536
#: Decisions kept for people to look at.
DECISIONS = 64
#: Loads a request may fail before it computes everything.
ATTEMPTS = 2


@dataclass(slots=True)
class Stats:
    """Counters since the start, in tokens unless the name says otherwise."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    hit_requests: int = 0
    failed_loads: int = 0
    saved_blocks: int = 0
    saved_states: int = 0
    failed_saves: int = 0
    taken_over: int = 0


@dataclass(slots=True)
class _Record:
    """One request. ``saved``: per row, blocks that need no further thought. ``keep``: positions at which
    a state is wanted. ``states``: positions whose state was saved or is being saved. ``attempts``: loads
    it may still fail."""

    request: Request
    chain: ContentChain
    hit: HitPlan | None = None
    votes: Votes | None = None
    answered_at: float = 0.0
    attempts: int = ATTEMPTS
    admitted: bool = False
    keep: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)
    saved: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Save:
    """A save until every rank has ended it. ``keys``: of its state. ``copies``: its request's memory stays
    until it has ended: another rank may have to write. ``gone``: that memory was taken away. ``dropped``:
    computed on a bad load, nobody is to see it."""

    op: Transfer
    keys: tuple[SnapshotKey, ...]
    copies: bool = False
    gone: bool = False
    dropped: bool = False
    copied: int = 0
    ended: int = 0
    bad: Bad = field(default_factory=Bad)


@dataclass(slots=True)
class _Load:
    op: Transfer
    tokens: int
    keys: tuple[SnapshotKey, ...]
    ended: int = 0
    bad: Bad = field(default_factory=Bad)


class SchedulerSide:
    """See the module text. ``workers``: ranks that report every operation."""

    def __init__(
        self,
        placement: Placement,
        coordinator: Coordinator,
        stores: Mapping[str, BlockStore],
        states: Mapping[str, SnapshotStore],
        workers: int,
        modes: Modes | None = None,
    ) -> None:
        self.placement, self.coordinator = placement, coordinator
        self._modes = modes or Modes()
        self._goes_on = continues_anywhere(placement.table)
        self.stats = Stats()
        self.tracker = RequestTracker()
        self._stores, self._states = stores, states
        self._workers = workers
        #: Request -> what its last admission was decided from; the newest ``DECISIONS`` ones.
        self.decisions: dict[str, tuple[HitPlan, Votes]] = {}
        self._records: dict[str, _Record] = {}
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._bad: dict[tuple[str, bytes], None] = {}
        self._message = Message()
        self._news = News()
        self._next_op = 1
        #: Saves of the step under way whose publication waits for its loads, and the blocks in them.
        self._held: list[int] = []
        self._in_saves: set[tuple[str, bytes]] = set()
        self._copies = {
            row.name: placement.copies(row) for row in placement.table.rows if row.kind in STORED
        }
        self._rows = [row for row in placement.table.rows if row.kind in STORED]

    @property
    def layered(self) -> bool:
        """A request computes in the step that loads it."""
        return self._modes.layered_loads

    # -- new requests and hits -----------------------------------------------------------------------

    def added(self, request: Request) -> None:
        extras = []
        if request.media:
            digest = hashlib.sha256(f"media/{request.media}".encode()).digest()
            extras.append(ChainExtra(0, 0, "media", digest))
        chain = ContentChain(self.placement.table.grain, extras=extras)
        self._records[request.request_id] = _Record(request, chain)
        self.tracker.add(request.request_id)
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.prompt)

    def match(self, request: Request) -> int | None:
        record = self._records[request.request_id]
        if self.tracker.open_saves(request.request_id):
            return None  # one direction at a time
        now = time.monotonic()
        if record.hit is None or now > record.answered_at + ANSWER_LIFE_S:
            record.hit = self._decide(record)
            record.answered_at = now
        if record.hit.p_star:
            self.tracker.matched(request.request_id)
        return record.hit.p_star

    def _decide(self, record: _Record) -> HitPlan:
        chain, tokens = record.chain, len(record.request.tokens)
        self._extend(record, tokens)
        plan = self.coordinator.plan(chain, store_of=self.placement.store_name)
        answers = {name: self._stores[name].lookup(ids) for name, ids in plan.ids.items()}
        votes = plan.votes(answers)
        record.votes = votes = self._without_bad(votes, chain)
        checkpoints = votes.checkpoints if record.attempts else {}
        present = votes.present if record.attempts else dict.fromkeys(votes.present, 0)
        return resolve_hit(
            self.placement.table,
            tokens,
            present,
            checkpoints,
            alignment=self.coordinator.alignment,
        )

    def _without_bad(self, votes: Votes, chain: ContentChain) -> Votes:
        """What was found, but could not be loaded last time, is not offered again."""
        if not self._bad:
            return votes
        present = {}
        for row in self.placement.table.chains:
            there = votes.present[row.name]
            assert not isinstance(there, int)
            links = self._links(row, chain)[: len(there)]
            names = [row.name] + [r.name for r in self._rows if r.follows == row.name]
            bad = [any((n, link.tobytes()) in self._bad for n in names) for link in links]
            present[row.name] = there & ~np.array(bad, np.bool_)
        grain = self.placement.table.grain
        checkpoints = {
            name: np.array(
                [
                    p
                    for p in where
                    if (name, chain.links[p // grain - 1].tobytes()) not in self._bad
                ],
                np.int64,
            )
            for name, where in votes.checkpoints.items()
        }
        return Votes(present, checkpoints)

    def _extend(self, record: _Record, tokens: int) -> None:
        """Hash the request's first ``tokens`` (confirmed) tokens; only new ones cost anything."""
        if record.chain.tokens < tokens:
            fresh = record.request.tokens[record.chain.tokens : tokens]
            record.chain.extend(np.array(fresh, np.uint32))

    def _links(self, row: GroupSpec, chain: ContentChain) -> npt.NDArray[np.uint8]:
        per_block = row.block_tokens // self.placement.table.grain
        return chain.links[per_block - 1 :: per_block]

    def allocated(self, request: Request, tokens: int) -> None:
        record = self._records[request.request_id]
        assert record.hit is not None and record.hit.p_star == tokens
        if not record.admitted:
            record.admitted = True
            keep = self.coordinator.admit(record.chain, record.hit, len(request.tokens))
            record.keep = {int(p) for p in keep}
        if record.votes is not None:
            self.decisions[request.request_id] = (record.hit, record.votes)
            if len(self.decisions) > DECISIONS:
                del self.decisions[next(iter(self.decisions))]
        self.tracker.allocated(request.request_id, load=tokens > 0 and not self.layered)
        hit, record.hit = record.hit, None
        if not tokens:
            return
        rows = {
            name: self._part(record, name, np.arange(start, stop, dtype=np.int64))
            for name, (start, stop) in hit.load.items()
            if stop > start
        }
        state: StatePart | None = None
        keys: tuple[SnapshotKey, ...] = ()
        if self.placement.table.snapshots:
            keys = self.coordinator.snapshots_at(record.chain, tokens)
            state = StatePart(tokens, keys[0].link, request.states[0])
        op = self._op(record, rows, state)
        self._loads[op.op_id] = _Load(op, tokens, keys)
        self._message.loads.append(op)
        if self.layered:
            self._have(record, tokens)

    def _op(self, record: _Record, rows: dict[str, RowPart], state: StatePart | None) -> Transfer:
        self._next_op += 1
        return Transfer(self._next_op, record.request.request_id, rows, state)

    def _have(self, record: _Record, tokens: int) -> None:
        """The first ``tokens`` tokens were loaded: their blocks are stored."""
        for row in self._rows:
            if row.kind is not Kind.SNAPSHOT:
                record.saved[row.name] = tokens // row.block_tokens

    def _part(self, record: _Record, name: str, blocks: npt.NDArray[np.int64]) -> RowPart:
        row = self.placement.table[name]
        source = row.follows if row.kind is Kind.SIDECAR else name
        table = np.array([*record.request.tables[source or name], 0], np.int64)
        pieces = self.placement.pieces(row)
        columns = blocks[:, None] * pieces + np.arange(pieces)
        pages = table[np.minimum(columns, len(table) - 1)]
        return RowPart(blocks, self._links(row, record.chain)[blocks], pages)

    # -- one step --------------------------------------------------------------------------------------

    def snapshot_positions(self, request: Request, start: int, end: int) -> Sequence[int]:
        record = self._records[request.request_id]
        return sorted(p for p in record.keep - record.states if start < p <= end)

    def build(self, view: StepView) -> Message:
        message, self._message = self._message, Message()
        for request_id in view.preempted:
            self._preempted(request_id)
            message.preempted.append(request_id)
        for request_id, confirmed in view.computed.items():
            record = self._records[request_id]
            self.tracker.scheduled(request_id)
            self._save_blocks(record, confirmed, message)
        for offered in view.snapshots:
            record = self._records[offered.request_id]
            self._save_state(record, offered.position, offered.slot, message, own=True)
        message.idle = view.idle
        self._held = [op.op_id for op in message.saves] if self._modes.held_back else []
        return message

    def _preempted(self, request_id: str) -> None:
        record = self._records[request_id]
        self.tracker.preempted(request_id)
        record.saved, record.hit = {}, None
        for save in self._saves.values():
            save.gone |= save.op.request_id == request_id

    def _save_blocks(self, record: _Record, confirmed: int, message: Message) -> None:
        """Issue a save of whole blocks that this step confirms and no lookup has found."""
        rows: dict[str, RowPart] = {}
        for row in self._rows:
            if row.kind is Kind.SNAPSHOT:
                continue
            done, blocks = record.saved.get(row.name, 0), confirmed // row.block_tokens
            if blocks <= done:
                continue
            record.saved[row.name] = blocks
            self._extend(record, confirmed)
            wanted = np.arange(done, blocks, dtype=np.int64)
            wanted = wanted[~self._known(record, row, wanted)]
            if self._modes.held_back:
                wanted = self._unheld(record, row, wanted)
            part = self._part(record, row.name, wanted)
            part = part.only((part.pages != 0).all(axis=1))  # freed pages: the block is given up
            if len(part.blocks):
                rows[row.name] = part
        if rows:
            self._open_save(record, self._op(record, rows, None), (), message)

    def _unheld(
        self, record: _Record, row: GroupSpec, blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Those of ``blocks`` that no save under way holds back: it may be dropped, and with it what another
        one added to the same object."""
        links = self._links(row, record.chain)[blocks]
        free = [(row.name, link.tobytes()) not in self._in_saves for link in links]
        return blocks[np.array(free, np.bool_)]

    def _known(
        self, record: _Record, row: GroupSpec, blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Which of ``blocks`` the last lookup found; a sidecar's are asked for by nobody, and saved
        where its source's are."""
        voter = row.follows if row.kind is Kind.SIDECAR else row.name
        there = record.votes.present.get(voter or "") if record.votes is not None else None
        known = np.zeros(len(blocks), np.bool_)
        if there is not None and not isinstance(there, int):
            inside = blocks < len(there)
            known[inside] = there[blocks[inside]]
        return known

    def _save_state(
        self, record: _Record, position: int, slot: int, message: Message, *, own: bool
    ) -> None:
        self._extend(record, position)
        keys = self.coordinator.snapshots_at(record.chain, position)
        op = self._op(record, {}, StatePart(position, keys[0].link, slot))
        op.own_slot = own
        record.states.add(position)
        self._open_save(record, op, keys, message)

    def _open_save(
        self, record: _Record, op: Transfer, keys: tuple[SnapshotKey, ...], message: Message
    ) -> None:
        self.tracker.save_opened(record.request.request_id)
        self._add_save(_Save(op, keys), message)

    def _add_save(self, save: _Save, message: Message) -> None:
        op = save.op
        states = self.placement.table.snapshots if op.state is not None else ()
        names = [name for name in op.rows if self.placement.table[name].window is None]
        names += [row.name for row in states]
        save.copies = any(self._copies[name] > op.attempt + 1 for name in names)
        self._saves[op.op_id] = save
        if self._modes.held_back:
            self._in_saves.update(_blocks_of(op))
        message.saves.append(op)

    # -- news from the ranks ---------------------------------------------------------------------------

    def update(self, reports: Sequence[Report]) -> News:
        for report in reports:
            for op_id, bad in report.loaded.items():
                self._load_moved(op_id, bad)
        self._release_held()
        for report in reports:
            for op_id in report.copied:
                self._copied(op_id)
            for op_id, bad in report.ended.items():
                self._save_moved(op_id, bad)
        news, self._news = self._news, News()
        return news

    def _release_held(self) -> None:
        """Every rank has reported the step: what it saved is published, but for requests that computed on
        a load that was bad on any of them."""
        for op_id in self._held:
            save = self._saves[op_id]
            save.dropped = save.op.request_id in self._news.invalid
            if (
                save.dropped
            ):  # before anything of the next step is saved, so that may be the same blocks
                self._in_saves.difference_update(_blocks_of(save.op))
            (self._message.discards if save.dropped else self._message.commits).append(op_id)
        self._held = []

    def _load_moved(self, op_id: int, bad: Bad) -> None:
        load = self._loads[op_id]
        load.ended += 1
        load.bad.merge(bad)
        if load.ended < self._workers:
            return
        del self._loads[op_id]
        request_id = load.op.request_id
        if not self.layered:
            self.tracker.load_finished(request_id)
        record = self._records.get(request_id)
        tokens = load.tokens
        if load.bad:
            tokens = self._still_valid(load)
            self.stats.failed_loads += 1
            self._remember_bad(load)
            if record is not None:
                self._load_failed(record, load)
        if record is not None:
            self._have(record, tokens)
        self.stats.hit_tokens += tokens
        self.stats.hit_requests += tokens > 0
        if not self.layered:
            self._news.loaded[request_id] = tokens
        elif load.bad:
            self._news.invalid[request_id] = tokens

    def _still_valid(self, load: _Load) -> int:
        """Tokens that the request can go on from. With states or windows none: what another boundary needs
        was not loaded, so the request asks again, and is offered a boundary that is valid in all rows."""
        if not self._goes_on:
            return 0
        ends = [load.tokens]
        for name, index in load.bad.rows.items():
            first = int(load.op.rows[name].blocks[index].min())
            ends.append(first * self.placement.table[name].block_tokens)
        step = self.coordinator.alignment
        return min(ends) // step * step

    def _load_failed(self, record: _Record, load: _Load) -> None:
        record.attempts -= 1
        record.hit = None
        if record.votes is not None:
            record.votes = self._without_bad(record.votes, record.chain)
        if load.bad.state:  # gone, and to be made anew when the request passes there
            record.keep.add(load.tokens)

    def _remember_bad(self, load: _Load) -> None:
        for name, index in load.bad.rows.items():
            for link in load.op.rows[name].links[index]:
                self._bad[name, link.tobytes()] = None
        for key in load.keys:
            if key.group in load.bad.state:
                self._bad[key.group, key.link] = None
                self.coordinator.missed(key)
        while len(self._bad) > BAD_LIMIT:
            del self._bad[next(iter(self._bad))]

    def _copied(self, op_id: int) -> None:
        save = self._saves[op_id]
        save.copied += 1
        if save.copied == self._workers and not save.copies:
            self._source_free(save)

    def _source_free(self, save: _Save) -> None:
        """Nobody reads the memory of this save any more, nor will."""
        request_id = save.op.request_id
        self.tracker.save_closed(request_id)
        if save.op.own_slot and save.op.state is not None:
            self._news.slots.append(save.op.state.slot)
        if request_id not in self._records and not self.tracker.open_saves(request_id):
            self.tracker.released(request_id)
            self._news.sent.append(request_id)

    def _save_moved(self, op_id: int, bad: Bad) -> None:
        save = self._saves[op_id]
        save.ended += 1
        save.bad.merge(bad)
        if save.ended < self._workers:
            return
        del self._saves[op_id]
        if not save.dropped:
            self._in_saves.difference_update(_blocks_of(save.op) if self._modes.held_back else ())
            self._stored(save)
        again = self._for_next_writer(save)
        if again is not None:
            again.own_slot, save.op.own_slot = save.op.own_slot, False
            self.tracker.save_opened(again.request_id)
            self._add_save(
                _Save(again, save.keys if again.state is not None else ()), self._message
            )
            self.stats.taken_over += 1
        if save.copies:
            self._source_free(save)

    def _stored(self, save: _Save) -> None:
        """A save has ended on every rank, well or not."""
        self.stats.failed_saves += bool(save.bad)
        for name, part in save.op.rows.items():
            stored = np.ones(len(part.blocks), np.bool_)
            stored[save.bad.rows.get(name, np.empty(0, np.int64))] = False
            self.stats.saved_blocks += int(stored.sum())
            if self._bad:
                for link in part.links[stored]:
                    self._bad.pop((name, link.tobytes()), None)
        if save.keys and not save.bad:
            self.stats.saved_states += 1
            for key in save.keys:
                self._bad.pop((key.group, key.link), None)
                self._remove(self.coordinator.stored(key))

    def _for_next_writer(self, save: _Save) -> Transfer | None:
        """What the elected writers failed and other ranks hold too, while the memory is still there."""
        op, attempt = save.op, save.op.attempt + 1
        if not save.copies or save.gone or save.dropped or not save.bad:
            return None
        rows = {}
        for name, index in save.bad.rows.items():
            if self._copies[name] > attempt and self.placement.table[name].window is None:
                mine = np.zeros(len(op.rows[name].blocks), np.bool_)
                mine[index] = True
                rows[name] = op.rows[name].only(mine)
        state = op.state if any(self._copies[n] > attempt for n in save.bad.state) else None
        if not rows and state is None:
            return None
        self._next_op += 1
        return Transfer(self._next_op, op.request_id, rows, state, attempt=attempt)

    def _remove(self, keys: Sequence[SnapshotKey]) -> None:
        """Snapshots that the budget gave up for better ones."""
        for key in keys:
            ids = self.placement.keys.snapshot_ids(key)
            for at, one in zip(self.placement.keys.of(key.group), ids, strict=True):
                self._states[self.placement.store_name(at)].remove(one[None])

    # -- the end of requests ----------------------------------------------------------------------------

    def finished(self, request: Request) -> bool:
        record = self._records.pop(request.request_id)
        if request.phase is Phase.FINISHED:
            self._extend(record, request.computed)
            self._save_blocks(record, request.computed, self._message)
            position, slot = request.boundary
            wanted = self.coordinator.finish(record.chain, request.reused, request.computed)
            if position and position not in record.states and position in wanted:
                self._save_state(record, position, slot, self._message, own=False)
        return self.tracker.finished(request.request_id)

    def pending(self) -> dict[str, int]:
        """Sizes of every map: all zero when nothing is under way."""
        return {
            "records": len(self._records),
            "tracked": len(self.tracker),
            "loads": len(self._loads),
            "saves": len(self._saves),
            "anomalies": self.tracker.anomalies,
        }

    def close(self) -> None:
        self._records.clear()


def _blocks_of(op: Transfer) -> list[tuple[str, bytes]]:
    return [(name, link.tobytes()) for name, part in op.rows.items() for link in part.links]
