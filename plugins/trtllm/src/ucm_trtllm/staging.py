"""From a prompt to a promise: what is stored is read into the arena and verified, then it is offered.

The engine has no way to hear of a failed load. So nothing is promised that does not lie verified in host
memory, where it stays pinned until every rank has copied it, or the promise is given up. A query waits at
most ``wait_s`` in all; what arrives later stays in the arena for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator import HitPlan, plan_lookup, resolve_hit
from ucm_core.errors import UcmError
from ucm_core.identity import ContentChain, object_ids
from ucm_core.store.contract import Status
from ucm_core.store.native_store import NativeBlockStore, NativeTask
from ucm_trtllm.arena import Arena
from ucm_trtllm.asking import Asker
from ucm_trtllm.messages import Links, Numbers
from ucm_trtllm.placement import Place, Placement
from ucm_trtllm.residents import Residents

Bools = npt.NDArray[np.bool_]

#: Readings that outlived their query. With more, a query reads nothing until some have ended.
LATE_LIMIT = 256
#: In place of a slot: what became of the block has been told.
_TOLD = -1


@dataclass(slots=True)
class Promise:
    """Blocks of each row that lie in the arena, pinned: ``slots[row]`` of blocks ``blocks[row]``.
    ``plan.local`` and ``plan.p_star`` bound the tokens; ``stored``: per row, which blocks the store had."""

    plan: HitPlan
    blocks: dict[int, Numbers]
    slots: dict[int, Numbers]


@dataclass(slots=True)
class _Reading:
    """Blocks of one row on their way into taken slots: a task per coordinate, one row a shard.
    ``slots``: ``_TOLD`` for a block whose result has been taken in."""

    place: Place
    links: Links
    slots: list[int]
    tasks: list[NativeTask]

    def block_over(self, at: int) -> bool:
        """Nothing of this block moves any more."""
        rows = [task.results().reshape(len(self.slots), -1)[at] for task in self.tasks]
        return not any(bool((row == Status.PENDING).any()) for row in rows)

    def statuses(self) -> npt.NDArray[np.uint8]:
        """``uint8[N]``: OK, PENDING, or a failure, the worst over all coordinates and shards."""
        worst = np.full(len(self.slots), Status.OK, np.uint8)
        for task in self.tasks:
            table = task.results().reshape(len(self.slots), -1)
            failed = np.where(table == Status.PENDING, Status.OK, table).max(axis=1)
            pending = (table == Status.PENDING).any(axis=1)
            said = np.where(
                failed != Status.OK, failed, np.where(pending, Status.PENDING, Status.OK)
            )
            worst = np.where(worst == Status.OK, said, worst)
        return worst


@dataclass(slots=True)
class Counts:
    """Since the start, in blocks unless named otherwise."""

    staged: int = 0
    refused: int = 0
    failed: int = 0
    promised_tokens: int = 0
    asked_tokens: int = 0


class Stager:
    """Used by the thread that schedules alone. ``stores``: of packed geometry, by name. ``whole``: the engine
    takes all of a promise; else it may stop anywhere in it, and a window needs its blocks at every boundary.
    """

    def __init__(
        self,
        placement: Placement,
        stores: Mapping[str, NativeBlockStore],
        arena: Arena,
        *,
        wait_s: float,
        whole: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement = placement
        self._stores = stores
        self._arena = arena
        self._wait_s = wait_s
        self._whole = whole
        self._clock = clock
        self._asker = Asker(stores)
        self._late: list[_Reading] = []
        self.residents = [Residents(n) for n in arena.name.row_slots]
        self.counts = Counts()

    # -- the query -----------------------------------------------------------------------------------

    def promise(
        self, chain: ContentChain, tokens: int, local: int
    ) -> tuple[Promise | None, dict[str, Bools]]:
        """What can be loaded beyond ``local`` of a prompt of ``tokens``, pinned; None: nothing. And what is
        known to be stored, per row. Takes at most ``wait_s``."""
        until = self._clock() + self._wait_s
        self.poll()
        self.counts.asked_tokens += tokens - local
        here = self._here(chain)
        best = self._resolve(tokens, local, here)
        most = max(0, tokens - 1) // self._placement.alignment * self._placement.alignment
        stored = here
        if best.p_star < min(most, chain.tokens // self._placement.grain * self._placement.grain):
            there = self._stored(chain, until)
            stored = {name: here[name] | there[name] for name in here}
            target = self._resolve(tokens, local, stored)
            if target.p_star > best.p_star:
                self._stage(chain, target, until)
                here = self._here(chain)
                best = self._resolve(tokens, local, here)
        if best.external <= 0:
            return None, stored
        self.counts.promised_tokens += best.external
        return self._pinned(chain, best), stored

    def release(self, promise: Promise) -> None:
        """Every rank has copied it, or nobody will."""
        for row, slots in promise.slots.items():
            self.residents[row].unpin(slots)

    def poll(self) -> None:
        """Take in what was read since."""
        late, self._late = self._late, []
        for reading in late:
            self._settle(reading)

    def close(self) -> None:
        for reading in self._late:
            for task in reading.tasks:
                task.cancel()
        self._late = []
        self._asker.close()

    @property
    def under_way(self) -> int:
        """Readings that have not ended."""
        return len(self._late)

    # -- what is where -------------------------------------------------------------------------------

    def _links(self, place: Place, chain: ContentChain) -> Links:
        """``uint8[n, 32]``: where the whole blocks of a row end."""
        per = place.row.block_tokens // self._placement.grain
        return chain.links[per - 1 :: per]

    def _here(self, chain: ContentChain) -> dict[str, Bools]:
        """Per chain row: which blocks lie verified in the arena, sidecars included."""
        found = {}
        for place in self._placement.chains:
            there: Bools = np.ones(len(self._links(place, chain)), np.bool_)
            for one in (place, *self._placement.followers(place)):
                there &= self.residents[one.index].find(self._links(one, chain)) >= 0
            found[place.row.name] = there
        return found

    def _stored(self, chain: ContentChain, until: float) -> dict[str, Bools]:
        """Per chain row: which blocks the stores have; none where there is no answer in time."""
        placement = self._placement
        of = {id(place.row): place for place in placement.places}
        plan = plan_lookup(
            placement.keys, chain, store_of=lambda at: placement.store_name(of[id(at.row)], at)
        )
        votes = self._asker.ask(plan, max(0.0, until - self._clock()))
        found = {}
        for place in placement.chains:
            answer = None if votes is None else votes.present.get(place.row.name)
            blocks = len(self._links(place, chain))
            assert not isinstance(answer, int)
            found[place.row.name] = (
                np.zeros(blocks, np.bool_) if answer is None else answer[:blocks]
            )
        return found

    def _resolve(self, tokens: int, local: int, present: Mapping[str, Bools]) -> HitPlan:
        return resolve_hit(
            self._placement.table,
            tokens,
            {row: self._usable(row, there, local) for row, there in present.items()},
            local=local,
            alignment=self._placement.alignment,
        )

    def _usable(self, row: str, there: Bools, local: int) -> Bools:
        """Of a window's blocks, where the engine may stop anywhere: those without a gap before them."""
        spec = self._placement.table[row]
        if self._whole or spec.window is None:
            return there
        first = local // spec.block_tokens
        rest = there[first:]
        usable: Bools = there.copy()
        if not rest.all():
            usable[first + int(rest.argmin()) :] = False
        return usable

    def _needed(self, place: Place, plan: HitPlan) -> Numbers:
        """Blocks of a row that must be there for the engine to continue where it will."""
        first, stop = plan.load[place.row.name]
        if not self._whole and place.row.window is not None and stop > first:
            first = plan.local // place.row.block_tokens
        return np.arange(first, stop, dtype=np.int64)

    # -- reading -------------------------------------------------------------------------------------

    def _stage(self, chain: ContentChain, target: HitPlan, until: float) -> None:
        """Read what the target needs and is not here; wait for it until then."""
        needed = [
            (place, self._needed(place, target))
            for place in self._placement.places
            if place.row.name in target.load
        ]
        held = [self._hold(chain, place, blocks) for place, blocks in needed]
        readings = []
        try:
            for place, blocks in needed:
                reading = self._read(chain, place, blocks)
                if reading is not None:
                    readings.append(reading)
        finally:
            for (place, _), slots in zip(needed, held, strict=True):
                self.residents[place.index].unpin(slots)
        for reading in readings:
            for task in reading.tasks:
                task.check(max(0.0, until - self._clock()))
        for reading in readings:
            self._settle(reading)

    def _hold(self, chain: ContentChain, place: Place, blocks: Numbers) -> Numbers:
        """Pin what is here of these blocks, so that reading the others does not push it out."""
        found = self.residents[place.index].find(self._links(place, chain)[blocks])
        found = found[found >= 0]
        self.residents[place.index].pin(found)
        return found

    def _read(self, chain: ContentChain, place: Place, blocks: Numbers) -> _Reading | None:
        residents = self.residents[place.index]
        links = self._links(place, chain)[blocks]
        links = links[residents.find(links) < 0]
        if not len(links) or len(self._late) >= LATE_LIMIT:
            self.counts.refused += len(links)
            return None
        slots = residents.take(len(links))
        self.counts.refused += len(links) - len(slots)
        if not slots:
            return None
        # The first blocks go first: a prefix is of use, its rest alone is not (but for a window, whose
        # last blocks are needed with the others or not at all).
        links = np.ascontiguousarray(links[: len(slots)])
        try:
            tasks = self._submit(place, links, slots)
        except (UcmError, ValueError):
            self._give_back(place, slots)
            return None
        return _Reading(place, links, slots, tasks)

    def _submit(self, place: Place, links: Links, slots: Sequence[int]) -> list[NativeTask]:
        tasks: list[NativeTask] = []
        where = np.array(slots, np.uint64) * np.uint64(self._arena.name.row_bytes[place.index])
        begin = np.uint64(self._arena.address(place.index))
        try:
            for at in self._placement.keys.of(place.row.name):
                shape = self._placement.packed(place, at)
                shards = np.arange(shape.shard_count, dtype=np.uint64)
                inside = shards * np.uint64(shape.shard_bytes)
                rows = (begin + where[:, None] + inside).reshape(-1, 1)
                ids = np.repeat(object_ids(at.seed, links), shape.shard_count, axis=0)
                numbers = np.tile(shards.astype(np.uint32), len(links))
                store = self._stores[self._placement.store_name(place, at)]
                tasks.append(store.load(ids, numbers, np.ascontiguousarray(rows)))
                begin += np.uint64(shape.shard_count * shape.shard_bytes)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        return tasks

    def _settle(self, reading: _Reading) -> None:
        """Verified blocks are residents from now on; what is still on its way is looked at again later."""
        residents = self.residents[reading.place.index]
        statuses = reading.statuses()
        for at, status in enumerate(statuses):
            slot = reading.slots[at]
            if slot < 0 or status == Status.PENDING:
                continue
            reading.slots[at] = _TOLD
            if status == Status.OK:
                residents.put(reading.links[at].tobytes(), slot)
                self.counts.staged += 1
            elif reading.block_over(at):
                residents.give_back(slot)
                self.counts.failed += 1
            else:  # it has failed, but another of its coordinates still moves
                reading.slots[at] = slot
        if any(slot >= 0 for slot in reading.slots):
            self._late.append(reading)

    def _give_back(self, place: Place, slots: Sequence[int]) -> None:
        for slot in slots:
            self.residents[place.index].give_back(slot)

    def _pinned(self, chain: ContentChain, plan: HitPlan) -> Promise:
        promise = Promise(plan, {}, {})
        for place in self._placement.places:
            if place.row.name not in plan.load:
                continue
            blocks = self._needed(place, plan)
            slots = self.residents[place.index].find(self._links(place, chain)[blocks])
            assert (slots >= 0).all()
            self.residents[place.index].pin(slots)
            promise.blocks[place.index], promise.slots[place.index] = blocks, slots
        return promise
