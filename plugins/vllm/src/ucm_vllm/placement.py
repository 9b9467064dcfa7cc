"""Where each rank's objects lie: the spec table, its coordinates, and their place in vLLM's pages.

One object used by both sides: the scheduler asks the store for every coordinate of a block, a worker
moves the bytes of its own. Ranks and sizes never enter an id, only global ranges do.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucm_core.adapter.blocks import BlockGrid, PageShape
from ucm_core.adapter.layout import ITEM_BYTES, Axis, LayoutDescriptor
from ucm_core.errors import UnsupportedError
from ucm_core.identity import Manifest, ModelIdentity
from ucm_core.spec import (
    Coordinate,
    GroupSpec,
    KeySpace,
    Kind,
    LayerSpec,
    RankRule,
    SeededCoordinate,
    SpecTable,
    rank_heads,
)
from ucm_core.store.contract import RunShape
from ucm_vllm.facts import Facts


def spec_table(facts: Facts, dtype: str, block_tokens: int) -> SpecTable:
    """The rows of a one-group model: every layer keeps the KV of the whole prefix."""
    latent = facts.kind == "mla"
    layers = [
        LayerSpec(
            index=index,
            name=f"layers.{index}",
            kind=Kind.CHAIN,
            entry_bytes=facts.cell_bytes * facts.total_heads,
            heads=facts.total_heads,
            head_size=facts.head_size,
            dtype=dtype,
            role="latent" if latent else "",
            rank_rule=RankRule.UNION if latent else RankRule.INTERSECTION,
        )
        for index in range(facts.stages[-1][1])
    ]
    return SpecTable.from_layers(layers, grain=block_tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """How this deployment cuts a namespace's objects; refuses at construction what cannot be cut."""

    facts: Facts
    grid: BlockGrid
    table: SpecTable
    keys: KeySpace

    @classmethod
    def build(
        cls, facts: Facts, identity: ModelIdentity, manifest: Manifest, dtype: str
    ) -> Placement:
        table = spec_table(facts, dtype, manifest.block_tokens)
        stages = {"target": [range(*stage) for stage in facts.stages]}
        keys = KeySpace(table, identity, stages=stages, slices=manifest.head_slices)
        placement = cls(facts, page_grid(facts, manifest.block_tokens), table, keys)
        for rank in range(facts.tp):
            placement.of_rank(0, rank)
        return placement

    @property
    def row(self) -> GroupSpec:
        """The one chain row (several groups come later)."""
        (row,) = self.table.chains
        return row

    def all(self) -> tuple[SeededCoordinate, ...]:
        """Every coordinate of a block; a block is there when all of them are."""
        return self.keys.of(self.row.name)

    def of_rank(self, pp_rank: int, tp_rank: int) -> list[SeededCoordinate]:
        """The coordinates whose bytes this rank holds (its replicas hold the same)."""
        first, last = rank_heads(self.row, tp_rank, self.facts.tp)
        layers = tuple(range(*self.facts.stages[pp_rank]))
        mine = [at for at in self.all() if at.coordinate.layers == layers]
        held = [
            at for at in mine if first <= at.coordinate.heads[0] and at.coordinate.heads[1] <= last
        ]
        width = sum(at.coordinate.heads[1] - at.coordinate.heads[0] for at in held)
        if width != last - first:
            raise UnsupportedError(
                f"the namespace keeps the {self.row.heads} kv heads in {len(mine)} slices, but each of "
                f"{self.facts.tp} tensor-parallel ranks holds {last - first}: a rank would hold part of a "
                "slice. Use another namespace, or one written with more head_slices"
            )
        return held

    def page(self) -> PageShape:
        """Strides inside a page of one rank, from the physical order vLLM resolved."""
        facts = self.facts
        rows, cell = facts.engine_block, facts.cell_bytes
        order = facts.physical_order
        # Only the order inside a page matters here; the distance between pages is the tensors'.
        if facts.heads == 1 or order in ("LBHNC", "BLHNC"):
            return PageShape(facts.heads, rows, cell, rows * cell, cell, facts.opaque)
        if order in ("LBNHC", "BLNHC"):
            return PageShape(facts.heads, rows, cell, cell, facts.heads * cell, facts.opaque)
        raise UnsupportedError(
            f"KV cache layout {order or 'unknown'} keeps the heads of a page apart, which is not supported "
            "yet; set VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC"
        )

    def run(self, coordinate: Coordinate) -> tuple[RunShape, int]:
        """The run of one piece of this coordinate's heads, and its offset in its rank's page."""
        first, last = coordinate.heads
        base = first // self.facts.heads * self.facts.heads  # first head of the rank that holds it
        return self.page().run(self.grid.piece_tokens, (first - base, last - base))

    def layout(self, coordinate: Coordinate) -> LayoutDescriptor:
        """Order of the bytes of a coordinate's objects: runs of vLLM's own pages, one shard a layer."""
        heads = coordinate.heads[1] - coordinate.heads[0]
        return object_layout(self.facts, self.grid, self.row.dtype, len(coordinate.layers), heads)


def object_layout(
    facts: Facts, grid: BlockGrid, dtype: str, layers: int, heads: int
) -> LayoutDescriptor:
    """The descriptor of objects of ``layers`` layers and ``heads`` heads, stored as vLLM's pages are.

    Bytes that the descriptor cannot tell apart are equal: rows that lie one after another in every page
    do not depend on vLLM's block size.
    """
    # With one head in an object both orders are the same bytes, whatever the rank's page holds.
    head_major = facts.physical_order in ("LBHNC", "BLHNC") and heads > 1
    item = ITEM_BYTES.get(dtype, 0)
    plain = not facts.opaque and facts.cell_bytes == item * (facts.head_size + facts.head_size_v)
    if not plain or facts.head_size_v not in (0, facts.head_size):
        name = facts.packing or f"cell{facts.cell_bytes}"
        order = "hnd" if head_major else "nhd"
        tag = f"opaque.{name}.{dtype}.{order}.b{grid.piece_tokens}"
        cell = grid.piece_tokens * facts.cell_bytes
        axes = [Axis("token", grid.pieces), Axis("head", heads), Axis("elem", cell)]
        return LayoutDescriptor(tag, (Axis("layer", layers), *axes))
    cell_axes = [Axis("kv", 2 if facts.head_size_v else 1), Axis("elem", facts.head_size)]
    piece = grid.piece_tokens
    if head_major:
        order_axes = [Axis("token", grid.pieces, piece), Axis("head", heads), Axis("token", piece)]
    else:
        order_axes = [Axis("token", grid.block_tokens), Axis("head", heads)]
    return LayoutDescriptor(dtype, (Axis("layer", layers), *order_axes, *cell_axes))


def fitting_block_tokens(facts: Facts, wanted: int) -> int:
    """``wanted``, or the next multiple of vLLM's block where pages cannot be cut."""
    if facts.opaque and wanted % facts.engine_block:
        return facts.engine_block * -(-wanted // facts.engine_block)
    return wanted


def page_grid(facts: Facts, block_tokens: int) -> BlockGrid:
    """The grid of stored blocks over vLLM's blocks; refuses a cut that the page cannot bear."""
    grid = BlockGrid(block_tokens, facts.engine_block)
    if facts.opaque and grid.piece_tokens != facts.engine_block:
        raise UnsupportedError(
            f"vLLM's blocks of {facts.engine_block} tokens are packed by the CPU kernel and cannot be cut "
            f"at block_tokens={block_tokens}: start vLLM with --block-size {block_tokens} (or a divisor), "
            f"or use a namespace whose block_tokens is a multiple of {facts.engine_block}"
        )
    return grid
