"""The unit map: from "layer k is about to run / has run" to units that are loaded and saved.

An engine speaks of layers, in the order in which it runs them, and may call for some of them only
(attention layers, say). A unit may be several layers (a row in one tensor) and may be read by other
layers (followers). The map settles at start, once, what each call means:

* a unit is complete *before the call that is the last one before its first reader runs*; where no
  call comes that early, when ``start_load`` returns;
* a unit is saved *after the first call at which its last layer has run*; where none comes, at the end.

So nothing is skipped because a layer has no call, and nothing is done twice because two have one.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.spec import (
    STORED,
    Coordinate,
    GroupSpec,
    Kind,
    SpecTable,
    UnitSpec,
    units,
)


@dataclass(frozen=True, slots=True, order=True)
class LayerKey:
    """A layer: the model part it belongs to (``"target"``, ``"draft"``) and its number in that part."""

    part: str
    index: int


class UnitMap:
    """Units of one rank and when they move. Built once; immutable; any thread may read it.

    ``stage``: the layers that this rank computes, per part (an uneven or custom partition is just
    another set). ``order``: the layers in the order they run; default part by part, ascending (draft
    after target). ``called``: layers that the engine calls for; default all. ``apart``: rows of which a
    call says nothing, also where it is for a layer of theirs (a recurrent state beside attention): there
    at start, saved at the end. ``tensors``: sets of layers that share one tensor; layers of other ranks
    in them are an error.

    Raises ConfigError where ``order``, ``called`` or ``apart`` name what is not here, or a tensor does
    not fit, and UnsupportedError where a follower's source is computed on another rank.
    """

    __slots__ = ("_after", "_before", "at_end", "at_start", "by_row", "order", "units")

    def __init__(
        self,
        table: SpecTable,
        stage: Mapping[str, Collection[int]],
        *,
        order: Sequence[LayerKey] | None = None,
        called: Collection[LayerKey] | None = None,
        apart: Collection[str] = (),
        tensors: Iterable[Sequence[LayerKey]] = (),
    ) -> None:
        here = [LayerKey(part, i) for part in table.num_layers for i in sorted(stage.get(part, ()))]
        self.order = tuple(here if order is None else order)
        if sorted(self.order) != sorted(here):
            raise ConfigError(
                f"the order of {len(self.order)} layers is not that of the {len(here)} layers of this "
                "rank, each once: take both from the engine's real layer list"
            )
        place = {key: i for i, key in enumerate(self.order)}
        calls = sorted(place[key] for key in _known(called, place))
        strange = sorted(set(apart) - {row.name for row in table.rows})
        if strange:
            raise ConfigError(f"rows that no call is for are not in the table: {strange[:4]}")
        by_part = _tensors_by_part(tensors)
        rows = {
            row.name: _units(row, stage.get(row.part, ()), by_part.get(row.part, []))
            for row in table.rows
            if row.kind in STORED
        }
        #: Units per stored row that has layers here, by first layer: all shards of its objects.
        self.by_row: Mapping[str, tuple[UnitSpec, ...]] = MappingProxyType(
            {name: made for name, made in rows.items() if made}
        )
        self.units = tuple(unit for made in self.by_row.values() for unit in made)
        before: dict[int, list[UnitSpec]] = {}
        after: dict[int, list[UnitSpec]] = {}
        for row in table.rows:
            readers = _readers(table, row, stage)
            for unit in self.by_row.get(row.name, ()):
                if row.name in apart:
                    before.setdefault(-1, []).append(unit)
                    after.setdefault(-1, []).append(unit)
                    continue
                runs = [place[LayerKey(row.part, i)] for i in unit.layers]
                first = min([*runs, *(place[key] for key in readers)])
                at = bisect.bisect_right(calls, first) - 1
                before.setdefault(calls[at] if at >= 0 else -1, []).append(unit)
                at = bisect.bisect_left(calls, max(runs))
                after.setdefault(calls[at] if at < len(calls) else -1, []).append(unit)
        #: Must be in place when ``start_load`` returns / are saved in ``wait_for_save``: no call is
        #: early or late enough.
        self.at_start = tuple(before.pop(-1, ()))
        self.at_end = tuple(after.pop(-1, ()))
        self._before = {self.order[at]: tuple(made) for at, made in before.items()}
        self._after = {self.order[at]: tuple(made) for at, made in after.items()}

    def before(self, layer: LayerKey) -> tuple[UnitSpec, ...]:
        """Units that must be in place before ``layer`` runs and were not needed at an earlier call."""
        return self._before.get(layer, ())

    def after(self, layer: LayerKey) -> tuple[UnitSpec, ...]:
        """Units whose bytes are final now that ``layer`` has run."""
        return self._after.get(layer, ())


def _known(
    called: Collection[LayerKey] | None, place: Mapping[LayerKey, int]
) -> Collection[LayerKey]:
    if called is None:
        return place
    strange = sorted(set(called) - set(place))
    if strange:
        raise ConfigError(
            f"the engine calls for layers that this rank does not compute: {strange[:4]}"
        )
    return set(called)


def _tensors_by_part(tensors: Iterable[Sequence[LayerKey]]) -> dict[str, list[list[int]]]:
    by_part: dict[str, list[list[int]]] = {}
    for tensor in tensors:
        parts = {key.part for key in tensor}
        if len(parts) > 1:
            raise ConfigError(
                f"one tensor holds layers of several model parts: {sorted(tensor)[:4]}"
            )
        for part in parts:
            by_part.setdefault(part, []).append([key.index for key in tensor])
    return by_part


def _units(
    row: GroupSpec, held: Collection[int], tensors: Sequence[Sequence[int]]
) -> tuple[UnitSpec, ...]:
    layers = tuple(i for i in row.layers if i in set(held))
    if not layers:
        return ()
    mine = tensors if row.kind is not Kind.SIDECAR else ()
    return units(row, Coordinate(layers, (0, row.heads)), mine)


def _readers(
    table: SpecTable, row: GroupSpec, stage: Mapping[str, Collection[int]]
) -> list[LayerKey]:
    """Layers of this rank, in rows that follow ``row``, that read its data without storing any."""
    readers: list[LayerKey] = []
    for other in table.rows:
        if other.kind is Kind.FOLLOWER and other.follows == row.name:
            mine = [LayerKey(other.part, i) for i in other.layers if i in stage.get(other.part, ())]
            if mine and not any(i in stage.get(row.part, ()) for i in row.layers):
                raise UnsupportedError(
                    f"layer {mine[0].index} of {mine[0].part!r} reuses the data of row {row.name!r}, "
                    "none of whose layers is on the same pipeline stage"
                )
            readers += mine
    return readers
