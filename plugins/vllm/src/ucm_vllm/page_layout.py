"""vLLM's pages in the words of the core: strides inside a page, grids over it, layout descriptors."""

from __future__ import annotations

import math

from ucm_core.adapter.blocks import BlockGrid, PageShape
from ucm_core.adapter.layout import ITEM_BYTES, Axis, LayoutDescriptor
from ucm_core.errors import UnsupportedError
from ucm_vllm.facts import Facts, PageKind

_HEAD_MAJOR = ("LBHNC", "BLHNC")
_TOKEN_MAJOR = ("LBNHC", "BLNHC")


def page_shape(kind: PageKind, order: str) -> PageShape:
    """Strides inside a page of one rank. ``order``: the physical order vLLM resolved.

    Only the order inside a page matters here; the distance between pages is the tensors'.
    """
    rows, cell = kind.engine_block, kind.cell_bytes
    if kind.heads == 1 or order in _HEAD_MAJOR:
        return PageShape(kind.heads, rows, cell, rows * cell, cell, kind.opaque)
    if order in _TOKEN_MAJOR:
        return PageShape(kind.heads, rows, cell, cell, kind.heads * cell, kind.opaque)
    raise UnsupportedError(
        f"KV cache layout {order or 'unknown'} keeps the heads of a page apart, which is not supported "
        "yet; set VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC"
    )


def object_layout(
    kind: PageKind, order: str, grid: BlockGrid, dtype: str, layers: int, heads: int
) -> LayoutDescriptor:
    """The descriptor of objects of ``layers`` layers and ``heads`` heads, stored as vLLM's pages are.

    Bytes that the descriptor cannot tell apart are equal: rows that lie one after another in every page
    do not depend on vLLM's block size.
    """
    # With one head in an object both orders are the same bytes, whatever the rank's page holds.
    head_major = order in _HEAD_MAJOR and heads > 1
    item = ITEM_BYTES.get(dtype, 0)
    plain = not kind.opaque and kind.cell_bytes == item * (kind.head_size + kind.head_size_v)
    if not plain or kind.head_size_v not in (0, kind.head_size):
        name = kind.packing or f"cell{kind.cell_bytes}"
        inner = "hnd" if head_major else "nhd"
        tag = f"opaque.{name}.{dtype}.{inner}.b{grid.piece_tokens}"
        cell = grid.piece_tokens * kind.cell_bytes
        axes = [Axis("token", grid.pieces), Axis("head", heads), Axis("elem", cell)]
        return LayoutDescriptor(tag, (Axis("layer", layers), *axes))
    cell_axes = [Axis("kv", 2 if kind.head_size_v else 1), Axis("elem", kind.head_size)]
    piece = grid.piece_tokens
    if head_major:
        order_axes = [Axis("token", grid.pieces, piece), Axis("head", heads), Axis("token", piece)]
    else:
        order_axes = [Axis("token", grid.block_tokens), Axis("head", heads)]
    return LayoutDescriptor(dtype, (Axis("layer", layers), *order_axes, *cell_axes))


def fitting_block_tokens(facts: Facts, wanted: int) -> int:
    """``wanted``, or the next multiple of vLLM's blocks where pages cannot be cut."""
    whole = math.lcm(*(kind.engine_block for kind in facts.kinds if kind.opaque))
    return wanted if wanted % whole == 0 else whole * -(-wanted // whole)


def page_grid(kind: PageKind, block_tokens: int) -> BlockGrid:
    """The grid of stored blocks over vLLM's blocks; refuses a cut that the page cannot bear."""
    grid = BlockGrid(block_tokens, kind.engine_block)
    if kind.opaque and grid.piece_tokens != kind.engine_block:
        raise UnsupportedError(
            f"vLLM's blocks of {kind.engine_block} tokens are packed by the CPU kernel and cannot be cut "
            f"at block_tokens={block_tokens}: start vLLM with --block-size {block_tokens} (or a divisor), "
            f"or use a namespace whose block_tokens is a multiple of {kind.engine_block}"
        )
    return grid
