"""Access units: what one fetch or store moves, and when a layer call completes or starts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ucm_core.errors import ConfigError
from ucm_core.spec.coordinates import Coordinate
from ucm_core.spec.group import GroupSpec


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One shard of a group's objects at one coordinate. ``shard``: its index inside the object.

    Its data must be in place before ``first`` computes and may be saved after ``last`` has run.
    """

    group: str
    shard: int
    layers: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.layers[0]

    @property
    def last(self) -> int:
        return self.layers[-1]


def units(
    row: GroupSpec, coordinate: Coordinate, tensors: Iterable[Sequence[int]] = ()
) -> tuple[UnitSpec, ...]:
    """Units of ``row`` at ``coordinate``, by first layer.

    ``tensors``: sets of layers that the engine keeps in one tensor; each is one unit (a *row*), and
    every other layer is a unit of its own, so the two can be mixed and none is left out. Raises
    ConfigError when a tensor mixes layers of the coordinate with others, or two tensors share one.
    """
    here = set(coordinate.layers)
    joined: dict[int, tuple[int, ...]] = {}
    for tensor in tensors:
        members = tuple(sorted(set(tensor)))
        inside = [i for i in members if i in here]
        if not inside:
            continue
        if len(inside) != len(members) or any(i in joined for i in members):
            raise ConfigError(
                f"row {row.name!r}: the tensor of layers {members} does not fit layers "
                f"{coordinate.layers}: one tensor must lie in one group and stage, in one tensor only"
            )
        joined.update(dict.fromkeys(members, members))
    ordered = dict.fromkeys(joined.get(i, (i,)) for i in coordinate.layers)
    return tuple(UnitSpec(row.name, shard, layers) for shard, layers in enumerate(ordered))
