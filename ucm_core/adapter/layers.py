"""The layer pipeline: loads overlapped with compute, saves as layers finish, once each, none forgotten.

The engine calls before a layer computes and after it, in ascending order; it may call the same layer
several times, or not at all where it was expected to (a captured graph that was replayed whole). What a
call means is settled in the unit map; here it happens. One object a step, one thread. Nothing waits but
``LayerLoads.wait``, at most until the store's own deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ucm_core.adapter.transfer import NOTHING_QUEUED, BlockTransfer, Mark
from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.spec import UnitSpec
from ucm_core.store.contract import CommitMode, Task


@dataclass(slots=True)
class RowTransfer:
    """A transfer of blocks of ``row``; its shards are those of the row's units on this rank.

    ``missed``: a layer computed without having asked for what it reads: the blocks are not to be used.
    """

    row: str
    transfer: BlockTransfer
    missed: bool = False


class LookAhead:
    """How many layers ahead of the computing one are loaded: measured load time over compute time.

    ``fixed``: the operator's number instead. Kept over steps, by the thread that computes.
    """

    #: Layers before anything was measured, and at most.
    START, MOST = 2, 64
    #: Weight of a new measurement.
    FRESH = 0.25

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._load_s = 0.0
        self._compute_s = 0.0

    @property
    def layers(self) -> int:
        """At least one: the next layer."""
        if self._fixed is not None:
            return self._fixed
        if not self._load_s or not self._compute_s:
            return self.START
        return max(1, min(self.MOST, round(self._load_s / self._compute_s + 0.5)))

    def loaded(self, seconds: float) -> None:
        """A layer took so long from submission to readiness."""
        self._load_s += (seconds - self._load_s) * (self.FRESH if self._load_s else 1.0)

    def computed(self, seconds: float) -> None:
        """A layer took so long to compute."""
        self._compute_s += (seconds - self._compute_s) * (self.FRESH if self._compute_s else 1.0)


@dataclass(slots=True)
class _Sent:
    at: float
    tasks: list[Task] = field(default_factory=list)


class LayerLoads:
    """Loads of one step. What no call can wait for (``UnitMap.at_start``) is there when it is built.

    Nothing is written before ``after``: what the engine had queued when the step began.
    """

    def __init__(
        self,
        units: UnitMap,
        transfers: Sequence[RowTransfer],
        look_ahead: LookAhead,
        after: tuple[int, object] = NOTHING_QUEUED,
    ) -> None:
        self._units = units
        self._after = after
        self._transfers = list(transfers)
        self._look_ahead = look_ahead
        #: Layers whose call waits for something, in the order of the calls.
        self._calls = [key for key in units.order if units.before(key)]
        self._place = {key: at for at, key in enumerate(self._calls)}
        self._sent: list[_Sent] = []
        self._waited = -1
        self._computing_since: float | None = None
        for task in self._submit(units.at_start).tasks:
            task.wait()
        self._submit_up_to(look_ahead.layers)

    def _submit(self, units: Sequence[UnitSpec]) -> _Sent:
        sent = _Sent(time.monotonic())
        for unit in units:
            for moved in self._transfers:
                if moved.row == unit.group:
                    task = moved.transfer.load(_shards(unit), self._after)
                    if task is not None:
                        sent.tasks.append(task)
        return sent

    def _submit_up_to(self, stop: int) -> None:
        while len(self._sent) < min(stop, len(self._calls)):
            self._sent.append(self._submit(self._units.before(self._calls[len(self._sent)])))

    def wait(self, layer: LayerKey) -> None:
        """Until everything that ``layer`` reads is there, or has failed; then look further ahead.

        Repeated calls, and layers that wait for nothing, return at once.
        """
        at = self._place.get(layer)
        if at is None or at <= self._waited:
            return
        if self._computing_since is not None and at == self._waited + 1:
            self._look_ahead.computed(time.monotonic() - self._computing_since)
        self._miss(self._calls[self._waited + 1 : at])
        self._submit_up_to(at + 1 + self._look_ahead.layers)
        sent = self._sent[at]
        for task in sent.tasks:
            task.wait()
        if sent.tasks:
            self._look_ahead.loaded(time.monotonic() - sent.at)
        self._waited = at
        self._computing_since = time.monotonic()

    def _miss(self, layers: Sequence[LayerKey]) -> None:
        """These layers did not ask before they computed."""
        rows = {unit.group for layer in layers for unit in self._units.before(layer)}
        for moved in self._transfers:
            moved.missed |= moved.row in rows

    def finish(self) -> None:
        """The forward pass is over: what was not asked for by now was computed without. No byte moves
        after this. Idempotent."""
        self._miss(self._calls[self._waited + 1 :])
        self._waited = len(self._calls)
        for moved in self._transfers:
            moved.transfer.fence()


class LayerSaves:
    """Saves of one step: each unit once, after its last layer; what nobody called for at the end.

    ``mark`` is taken where a layer has been called for: its bytes are final once that has fired.
    """

    def __init__(
        self,
        units: UnitMap,
        transfers: Sequence[RowTransfer],
        commit: CommitMode = CommitMode.AUTO,
        mark: Mark = lambda: NOTHING_QUEUED,
    ) -> None:
        self._units = units
        self._transfers = list(transfers)
        self._commit = commit
        self._mark = mark
        self._saved: set[UnitSpec] = set()

    def save(self, layer: LayerKey) -> None:
        """``layer`` has computed: submit what it completed. The first call counts."""
        due = [unit for unit in self._units.after(layer) if unit not in self._saved]
        after = self._mark() if due else NOTHING_QUEUED
        for unit in due:
            self._saved.add(unit)
            self._dump(unit.group, _shards(unit), after)

    def finish(self) -> None:
        """The forward pass is over: submit the rest, neighbouring shards of a row in one task."""
        after = self._mark()
        for row, units in self._units.by_row.items():
            left = [_shards(unit) for unit in units if unit not in self._saved]
            for run in _joined(left):
                self._dump(row, run, after)
            self._saved.update(units)

    def _dump(self, row: str, shards: range, after: tuple[int, object]) -> None:
        for moved in self._transfers:
            if moved.row == row:
                moved.transfer.dump(shards, self._commit, after)


def _shards(unit: UnitSpec) -> range:
    return range(unit.shard, unit.shard + unit.shards)


def _joined(ranges: Sequence[range]) -> list[range]:
    """Ascending ranges, with neighbours joined."""
    found: list[range] = []
    for one in ranges:
        if found and found[-1].stop == one.start:
            found[-1] = range(found[-1].start, one.stop)
        else:
            found.append(one)
    return found
