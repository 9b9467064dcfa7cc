"""Where a group's objects lie: global layer ranges and global kv-head ranges, never ranks.

TP, PP, CP and DP sizes decide only which process holds which coordinate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.spec.group import GroupSpec
from ucm_core.spec.kinds import RankRule
from ucm_core.spec.table import SpecTable

#: Layers of each PP stage, per model part: ``{"target": [range(0, 48), range(48, 96)]}``.
Stages = Mapping[str, Sequence[Collection[int]]]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The part of a group in one object: its global layers, and kv heads ``[heads[0], heads[1])``."""

    layers: tuple[int, ...]
    heads: tuple[int, int]

    def shard_of(self, layer: int) -> int:
        """Index of ``layer``'s unit inside the object. Raises ValueError for another stage's layer."""
        return self.layers.index(layer)


def whole(table: SpecTable) -> Stages:
    """No pipeline parallelism: one stage holds every layer of every part."""
    return {part: [range(n)] for part, n in table.num_layers.items()}


def check_stages(table: SpecTable, stages: Stages) -> None:
    """Each layer of each part must be in exactly one stage. Raises ConfigError."""
    for part, count in table.num_layers.items():
        held = sorted(layer for stage in stages.get(part, ()) for layer in stage)
        if held != list(range(count)):
            raise ConfigError(
                f"pipeline stages of {part!r} hold {len(held)} layers ({held[:4]}...), expected each "
                f"of the {count} layers once; take the stages from the engine's real layer lists"
            )


def head_slices(row: GroupSpec, slices: int) -> tuple[tuple[int, int], ...]:
    """The head ranges that the row's objects are cut into: ascending, equal, covering all heads.

    Replicated rows are never cut. With more slices than heads, TP ranks hold copies of a head, and
    there is one slice a head. Raises UnsupportedError where heads do not divide.
    """
    if row.rank_rule is RankRule.UNION:
        return ((0, row.heads),)
    if slices % row.heads == 0:
        slices = row.heads
    if row.heads % slices:
        raise UnsupportedError(
            f"row {row.name!r}: {row.heads} heads cannot be cut into {slices} slices; choose "
            "head_slices (by default the tensor-parallel size) that divides them or a multiple of them"
        )
    width = row.heads // slices
    return tuple((at, at + width) for at in range(0, row.heads, width))


def coordinates(row: GroupSpec, stages: Stages, slices: int) -> tuple[Coordinate, ...]:
    """All objects that one block of ``row`` consists of, by stage, then by head range.

    A block counts only when all of them are there. A stage without layers of the row has none.
    """
    held = [tuple(i for i in row.layers if i in set(stage)) for stage in stages[row.part]]
    return tuple(
        Coordinate(layers, heads) for layers in held if layers for heads in head_slices(row, slices)
    )


def rank_heads(row: GroupSpec, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Global head range that a TP rank holds: its share, or one (copied) head when there are more
    ranks than heads; all heads of a replicated row. Raises UnsupportedError where it is uneven."""
    if row.rank_rule is RankRule.UNION:
        return 0, row.heads
    if tp_size >= row.heads:
        if tp_size % row.heads:
            raise _uneven(row, tp_size)
        head = tp_rank * row.heads // tp_size
        return head, head + 1
    if row.heads % tp_size:
        raise _uneven(row, tp_size)
    width = row.heads // tp_size
    return tp_rank * width, (tp_rank + 1) * width


def _uneven(row: GroupSpec, tp_size: int) -> UnsupportedError:
    return UnsupportedError(
        f"row {row.name!r}: {row.heads} heads do not spread evenly over tensor-parallel size {tp_size}"
    )
