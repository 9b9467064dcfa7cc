"""vLLM's pages in the words of the core: strides inside a page, grids over it, layout descriptors."""

from __future__ import annotations

import math
import re

from ucm_core.adapter.blocks import BlockGrid, PageShape, PieceRuns
from ucm_core.adapter.layout import ITEM_BYTES, LayoutDescriptor
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
        return PageShape(kind.heads, rows, cell, rows * cell, cell, kind.packed)
    if order in _TOKEN_MAJOR:
        return PageShape(kind.heads, rows, cell, cell, kind.heads * cell, kind.packed)
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
    plain = kind.cell_bytes == item * (kind.head_size + kind.head_size_v)
    piece = grid.piece_tokens
    if kind.opaque or not plain or kind.head_size_v not in (0, kind.head_size):
        name = kind.packing or f"cell{kind.cell_bytes}"
        inner = "hnd" if head_major else "nhd"
        tag = f"opaque.{name}.{dtype}.{inner}.b{piece}"
        cell = piece * kind.cell_bytes
        return _layout(tag, f"layer:{layers},token:{grid.pieces},head:{heads},elem:{cell}")
    if kind.page_order is not None:
        one_head = kind.page_order.axes(piece, kind.head_size)
        return _layout(dtype, f"layer:{layers},token:{grid.pieces}@{piece},head:{heads},{one_head}")
    kv = f"kv:{2 if kind.head_size_v else 1},elem:{kind.head_size}"
    if head_major:
        rows = f"token:{grid.pieces}@{piece},head:{heads},token:{piece}"
    else:
        rows = f"token:{grid.block_tokens},head:{heads}"
    return _layout(dtype, f"layer:{layers},{rows},{kv}")


def _layout(dtype: str, axes: str) -> LayoutDescriptor:
    return LayoutDescriptor.parse(f"{dtype}|{axes}")


def is_shared(layout: LayoutDescriptor) -> bool:
    """Do all readers of the namespace have an order that converts to and from this one?

    An order that nobody described does not, nor do token splits by other than powers of two: pages of 48
    and of 64 tokens cut a block of 192 at places that do not fit each other.
    """
    steps = [int(step) for step in re.findall(r"token:\d+@(\d+)", str(layout))]
    return not layout.opaque and all(step & (step - 1) == 0 for step in steps)


def piece_runs(
    kind: PageKind, page: PageShape, grid: BlockGrid, heads: tuple[int, int], item_bytes: int
) -> PieceRuns:
    """The runs of one piece of a stored block, of heads ``[a, b)`` of a rank's page."""
    piece = grid.piece_tokens
    if kind.page_order is None or piece == kind.engine_block:
        run, offset = page.run(piece, heads)
        return PieceRuns.single(run, offset, page.token_stride)
    # Part of a page that is packed head by head: K and V of each head are a run each.
    cuts = kind.page_order.cut(piece, kind.engine_block, kind.head_size, item_bytes)
    return PieceRuns(
        shapes=tuple(cut.run for cut in cuts),
        offsets=tuple(h * page.head_stride + cut.offset for h in range(*heads) for cut in cuts),
        token_strides=tuple(cut.token_stride for _ in range(*heads) for cut in cuts),
    )


def fitting_block_tokens(facts: Facts, wanted: int) -> int:
    """``wanted``, or the next multiple of vLLM's blocks where pages cannot be cut so."""
    whole = math.lcm(
        *(kind.engine_block for kind in facts.kinds if not _can_be_cut(kind, wanted)),
    )
    return wanted if wanted % whole == 0 else whole * -(-wanted // whole)


def page_grid(kind: PageKind, block_tokens: int) -> BlockGrid:
    """The grid of stored blocks over vLLM's blocks; refuses a cut that the page cannot bear."""
    if not _can_be_cut(kind, block_tokens):
        raise UnsupportedError(
            f"vLLM's blocks of {kind.engine_block} tokens are packed by the CPU kernel and cannot be cut "
            f"at block_tokens={block_tokens}: start vLLM with --block-size {block_tokens} (or a divisor), "
            f"or use a namespace whose block_tokens is a multiple of {kind.engine_block}"
        )
    return BlockGrid(block_tokens, kind.engine_block)


def _can_be_cut(kind: PageKind, block_tokens: int) -> bool:
    """Can stored blocks of so many tokens be taken out of the pages?"""
    piece = math.gcd(block_tokens, kind.engine_block)
    if not kind.packed or piece == kind.engine_block:
        return True
    return kind.page_order is not None and piece % kind.page_order.unit == 0
