"""The engine's pages in the words of the core: heads before tokens, K and V apart (HND)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ucm_core.adapter.blocks import BlockGrid, PieceRuns
from ucm_core.adapter.layout import ITEM_BYTES, LayoutDescriptor
from ucm_core.errors import UnsupportedError
from ucm_core.store.contract import RunShape

#: Canonical element types by torch's names; what is missing is kept as bytes nobody describes.
KV_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
#: ``kv_cache_config.dtype`` -> canonical type.
KV_OPTIONS = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class Page:
    """One layer in one page of a rank: ``heads * tokens`` cells of ``cell_bytes``, once or (``value_offset``
    not None) once for K and once for V. ``opaque``: cells that cannot be told apart: whole pages move."""

    heads: int
    tokens: int
    head_size: int
    cell_bytes: int
    dtype: str
    value_offset: int | None = None
    opaque: bool = False

    @property
    def part_bytes(self) -> int:
        """Bytes of K (or of V, or of the latent rows)."""
        return self.heads * self.tokens * self.cell_bytes


def page_grid(page: Page, block_tokens: int) -> BlockGrid:
    """Stored blocks over pages. Raises UnsupportedError where pages would have to be cut and cannot."""
    grid = BlockGrid(block_tokens, page.tokens)
    if page.opaque and grid.piece_tokens != page.tokens:
        raise UnsupportedError(
            f"pages of {page.tokens} tokens of {page.dtype} cannot be cut into blocks of {block_tokens} "
            f"tokens: use a namespace whose block_tokens is a multiple of {page.tokens}"
        )
    return grid


def fitting_block_tokens(page: Page, wanted: int, *, whole: bool) -> int:
    """``wanted``, or the next multiple of a page where pages cannot be cut (``whole``)."""
    if not (page.opaque or whole) or wanted % page.tokens == 0:
        return wanted
    return page.tokens * -(-wanted // page.tokens)


def piece_runs(page: Page, grid: BlockGrid, heads: tuple[int, int]) -> PieceRuns:
    """The runs of one piece of a stored block, of heads ``[a, b)`` of a rank's page, K before V."""
    first, last = heads
    count, piece, cell = last - first, grid.piece_tokens, page.cell_bytes
    head_stride = page.tokens * cell
    offset = first * head_stride
    parts = (offset,) if page.value_offset is None else (offset, offset + page.value_offset)
    if piece == page.tokens:
        run = RunShape(count * head_stride)
        if page.value_offset == page.part_bytes and count == page.heads:
            return PieceRuns((RunShape(2 * run.nbytes),), (offset,), (cell,))
        return PieceRuns((run,), parts, (cell,) * len(parts))
    cut = RunShape(piece * cell, count, head_stride) if count > 1 else RunShape(piece * cell)
    return PieceRuns((cut,), parts, (cell,) * len(parts))


def object_layout(page: Page, grid: BlockGrid, layers: int, heads: int) -> LayoutDescriptor:
    """The order of the bytes that :func:`piece_runs` gathers, layers outermost."""
    piece = grid.piece_tokens
    if page.opaque:
        parts = 1 if page.value_offset is None else 2
        cell = parts * piece * page.cell_bytes
        tag = f"opaque.trtllm.{page.dtype}.b{piece}"
        axes = f"layer:{layers},token:{grid.pieces},head:{heads},elem:{cell}"
        return LayoutDescriptor.parse(f"{tag}|{axes}")
    kv = "" if page.value_offset is None else "kv:2,"
    axes = f"token:{grid.pieces}@{piece},{kv}head:{heads},token:{piece},elem:{page.head_size}"
    return LayoutDescriptor.parse(f"{page.dtype}|layer:{layers},{axes}")


def is_shared(layout: LayoutDescriptor) -> bool:
    """Can every reader of the namespace convert it? Else the order belongs into the ids: another order is
    then a clean miss. Token splits by other than powers of two do not fit those of other engines."""
    steps = [int(step) for step in re.findall(r"token:\d+@(\d+)", str(layout))]
    return not layout.opaque and all(step & (step - 1) == 0 for step in steps)


def plain_page(
    *,
    heads: int,
    head_size: int,
    dtype: str,
    part_bytes: int,
    tokens: int | None,
    value_offset: int | None,
) -> Page:
    """A page of K and V from what was registered: ``part_bytes`` is one of them, ``tokens`` None where the
    registration does not say it. Raises UnsupportedError where the sizes contradict each other."""
    bits = 4 if dtype == "nvfp4" else 8 * ITEM_BYTES.get(dtype, 0)
    row_bits = heads * head_size * bits
    if not row_bits:
        raise UnsupportedError(
            f"a KV cache of element type {dtype}: its size is not known here; set kv_cache_config.dtype "
            "to auto, fp8 or nvfp4"
        )
    found, rest = divmod(8 * part_bytes, row_bits)
    if rest or not found or (tokens is not None and found != tokens):
        raise UnsupportedError(
            f"{part_bytes} bytes of a layer's K in a page are no whole number of tokens of {heads} heads x "
            f"{head_size} elements of {dtype}"
            + (f", or not the {tokens} tokens that were registered" if tokens else "")
            + ": is config.json that of the model the engine runs?"
        )
    cell = head_size * bits // 8
    if math.gcd(8, head_size * bits) < 8 and head_size * bits % 8:
        raise UnsupportedError(f"heads of {head_size} elements of {dtype} are no whole bytes")
    return Page(heads, found, head_size, cell, dtype, value_offset, opaque=dtype == "nvfp4")
