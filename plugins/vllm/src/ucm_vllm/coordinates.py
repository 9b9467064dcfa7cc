"""Where each rank's objects lie in the model: layer ranges by pipeline stage, head ranges by slice.

One function used by both sides: the scheduler asks the store for every coordinate of a block, a worker
moves the bytes of its own. Ranks and sizes never enter an id, only global ranges do.
"""

from __future__ import annotations

from dataclasses import dataclass

from ucm_core.adapter.blocks import BlockGrid, PageShape
from ucm_core.errors import UnsupportedError
from ucm_core.store.contract import RunShape
from ucm_vllm.facts import Facts


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Objects that hold layers ``[first_layer, last_layer)`` and kv heads ``[first_head, last_head)``."""

    stage: int
    layers: tuple[int, int]
    heads: tuple[int, int]

    @property
    def layer_count(self) -> int:
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, slots=True)
class Cut:
    """How this deployment cuts the model under a namespace's ``head_slices``."""

    facts: Facts
    grid: BlockGrid
    head_slices: int

    def __post_init__(self) -> None:
        facts = self.facts
        if facts.total_heads % self.head_slices:
            raise UnsupportedError(
                f"head_slices={self.head_slices} of the namespace does not divide the model's "
                f"{facts.total_heads} kv heads; use another namespace"
            )
        if self.head_slices % facts.shards:
            raise UnsupportedError(
                f"the namespace keeps kv heads in {self.head_slices} slices, but tensor parallelism "
                f"splits them over {facts.shards} ranks: a rank would hold part of a slice. Use "
                f"another namespace, or one written with head_slices a multiple of {facts.shards}"
            )

    @property
    def heads_per_slice(self) -> int:
        return self.facts.total_heads // self.head_slices

    def all(self) -> list[Coordinate]:
        """Every coordinate of a block; a block is there when all of them are."""
        width = self.heads_per_slice
        return [
            Coordinate(stage, layers, (i * width, (i + 1) * width))
            for stage, layers in enumerate(self.facts.stages)
            for i in range(self.head_slices)
        ]

    def of_rank(self, pp_rank: int, tp_rank: int) -> list[Coordinate]:
        """The coordinates whose bytes this rank holds (its replicas hold the same)."""
        shard = tp_rank // self.facts.replicas
        per_shard = self.head_slices // self.facts.shards
        mine = range(shard * per_shard, (shard + 1) * per_shard)
        width = self.heads_per_slice
        layers = self.facts.stages[pp_rank]
        return [Coordinate(pp_rank, layers, (i * width, (i + 1) * width)) for i in mine]

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
        """The run of one piece of this coordinate's heads, and its offset inside a rank's page.

        The offset is relative to the rank that holds the coordinate.
        """
        facts = self.facts
        first, last = coordinate.heads
        base = first // facts.heads * facts.heads  # first head of the rank that holds it
        return self.page().run(self.grid.piece_tokens, (first - base, last - base))


def check_page_geometry(facts: Facts, block_tokens: int) -> BlockGrid:
    """The grid of stored blocks over engine blocks; refuses a cut that the page cannot bear."""
    grid = BlockGrid(block_tokens, facts.engine_block)
    if facts.opaque and grid.piece_tokens != facts.engine_block:
        raise UnsupportedError(
            f"vLLM's blocks of {facts.engine_block} tokens are packed by the CPU kernel and cannot be cut "
            f"at block_tokens={block_tokens}: start vLLM with --block-size {block_tokens} (or a divisor), "
            f"or use a namespace whose block_tokens is a multiple of {facts.engine_block}"
        )
    return grid
