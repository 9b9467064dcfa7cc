"""Access units: what one fetch or store moves, and which shards of an object it is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ucm_core.errors import ConfigError
from ucm_core.spec.coordinates import Coordinate
from ucm_core.spec.group import GroupSpec


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Layers of a group that are moved together: one layer, or all layers of one engine tensor.

    Shards ``[shard, shard + shards)`` of the group's objects at one coordinate. Its data must be in
    place before ``first`` computes and may be saved after ``last`` has run. Where all units of an object
    are equally large, ``shard`` is the unit's index and ``shards`` is 1.
    """

    group: str
    shard: int
    layers: tuple[int, ...]
    shards: int = 1

    @property
    def first(self) -> int:
        return self.layers[0]

    @property
    def last(self) -> int:
        return self.layers[-1]


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """How units make up an object: ``shard_count`` shards of ``layers_per_shard`` layers each.

    ``packing`` belongs into the layout descriptor: "" where shards are single layers in ascending
    order, else a short digest of which layers lie in which shard. Two engines that pack layers into
    tensors differently have one id and different bytes, and must not take each other's for their own.
    """

    shard_count: int
    layers_per_shard: int
    packing: str

    def shard_bytes(self, row: GroupSpec) -> int:
        """Bytes of one shard, all heads."""
        return self.layers_per_shard * row.shard_bytes


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
    ordered = list(dict.fromkeys(joined.get(i, (i,)) for i in coordinate.layers))
    width = math.gcd(*(len(layers) for layers in ordered))
    made: list[UnitSpec] = []
    shard = 0
    for layers in ordered:
        made.append(UnitSpec(row.name, shard, layers, len(layers) // width))
        shard += len(layers) // width
    return tuple(made)


def object_shape(of: Sequence[UnitSpec]) -> ObjectShape:
    """The shape of the objects that ``of``, all units of one row at one coordinate, make up.

    Sizes of a geometry are equal for all shards. Where tensors of different numbers of layers are
    mixed, a shard is their greatest common divisor and a unit is several shards.
    """
    count = sum(unit.shards for unit in of)
    layers = [layer for unit in of for layer in unit.layers]
    width = len(layers) // count if count else 1
    packing = ""
    if width > 1 or layers != sorted(layers):
        text = ";".join(",".join(map(str, unit.layers)) for unit in of)
        packing = f"{width}x{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return ObjectShape(count, width, packing)
