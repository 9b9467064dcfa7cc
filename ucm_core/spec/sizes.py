"""How much a spec table keeps: per token, per block, per million tokens, whole and per rank."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ucm_core.errors import UnsupportedError
from ucm_core.spec.coordinates import Stages, rank_heads
from ucm_core.spec.group import GroupSpec
from ucm_core.spec.kinds import STORED, Kind, RankRule
from ucm_core.spec.layer import TARGET
from ucm_core.spec.table import SpecTable

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Bytes of all layers of one row. ``per_token`` grows with the prompt (0 for snapshots).
    ``per_block``: one stored block, or one state. ``per_million``: stored for a prompt of 10^6 tokens:
    every block of a chain (a windowed one keeps its old blocks too, until they are collected), one
    state of a snapshot."""

    per_token: Fraction
    per_block: int
    per_million: int


def row_sizes(row: GroupSpec) -> RowSizes:
    """Sizes of ``row``; a row that stores nothing has none."""
    if row.kind not in STORED:
        return RowSizes(Fraction(0), 0, 0)
    per_block = len(row.layers) * row.shard_bytes
    if row.kind is Kind.SNAPSHOT:
        return RowSizes(Fraction(0), per_block, per_block)
    per_token = len(row.layers) * row.bytes_per_token
    return RowSizes(per_token, per_block, MILLION // row.block_tokens * per_block)


def live_bytes(row: GroupSpec, tokens: int) -> int:
    """What an engine must have in place to continue at ``tokens``, a multiple of the row's block: the
    window alone of a windowed row, one state of a snapshot."""
    if row.kind not in STORED:
        return 0
    per_block = len(row.layers) * row.shard_bytes
    if row.kind is Kind.SNAPSHOT:
        return per_block
    first, stop = row.needed(tokens)
    return (stop - first) * per_block


def even_stages(table: SpecTable, pp: int) -> Stages:
    """Layers of each pipeline stage when nobody says otherwise: equal parts, what is left over goes to
    the stages before the last, from behind. Other model parts lie on the last stage.

    Raises UnsupportedError for more stages than layers.
    """
    count = table.num_layers[TARGET]
    if not 1 <= pp <= count:
        raise UnsupportedError(f"{pp} pipeline stages for {count} layers")
    sizes = [count // pp] * pp
    for i in range(count % pp):
        sizes[-(i + 2) % pp] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    stages: dict[str, list[range]] = {}
    for part, layers in table.num_layers.items():
        if part == TARGET:
            stages[part] = [range(a, a + n) for a, n in zip(starts, sizes, strict=True)]
        else:
            stages[part] = [range(0)] * (pp - 1) + [range(layers)]
    return stages


def rank_share(row: GroupSpec, stage: set[int], tp: int) -> tuple[Fraction, int]:
    """(per token, per block or state) bytes of ``row`` on one TP rank of the stage that computes the
    layers ``stage``. Content that all ranks have equally is on each of them whole.

    Raises UnsupportedError where heads do not spread over ``tp``.
    """
    sizes = row_sizes(row)
    layers = len([i for i in row.layers if i in stage])
    part = Fraction(layers, len(row.layers))
    if row.rank_rule is RankRule.INTERSECTION and row.kind in STORED:
        first, last = rank_heads(row, 0, tp)
        part *= Fraction(last - first, row.heads)
    return sizes.per_token * part, int(sizes.per_block * part)
