"""In which order vLLM's CPU attention kernels keep the tokens of a page.

The kernels pack K and V of a page for their own loops, and which way depends on the instruction set,
so neither shapes nor strides tell the order of the bytes. The orders we know are written down as
layouts. Which one holds is not assumed but asked: the engine's own writer fills a page with numbers,
and an order counts only if it explains every byte. A page that none explains stays opaque.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.convert import Conversion
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.errors import UnsupportedError
from ucm_core.store.contract import RunShape

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
#: Writes K ``[tokens, elem]`` and V ``[tokens, elem]`` of one head into a page and returns its bytes.
PageWriter = Callable[[Bytes, Bytes], Bytes]


#: Axes outermost first, ``(dim, size, step)``; size 0 is all that is left of the dimension above step.
Axes = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class PageOrder:
    """Axes of K and of V in one head's part of a page, K before V.

    ``unit`` tokens and ``elem_unit`` elements lie in one tile: pages and head sizes are multiples.
    """

    name: str
    unit: int
    elem_unit: int
    k: Axes
    v: Axes

    def axes(self, tokens: int, elem: int) -> str:
        """Axes of one head's part of a page of ``tokens``, as text of a layout."""
        return f"kv({_text(self.k, tokens, elem)};{_text(self.v, tokens, elem)})"

    def cut(self, piece: int, page: int, elem: int, item_bytes: int) -> tuple[Cut, Cut]:
        """How K and V of ``piece`` consecutive tokens lie in a page of ``page`` tokens of one head.

        Raises UnsupportedError where the piece would cut a tile.
        """
        if piece % self.unit:
            raise UnsupportedError(
                f"the CPU kernel keeps {self.unit} tokens of a page in one tile: pieces of {piece} tokens "
                f"cannot be taken out; use block_tokens that is a multiple of {self.unit}"
            )
        whole = page * elem * item_bytes
        k, v = (_cut(axes, piece, page, elem, item_bytes) for axes in (self.k, self.v))
        return k, Cut(v.run, whole, v.token_stride)


@dataclass(frozen=True, slots=True)
class Cut:
    """A run of a page and where it begins: ``offset + first token * token_stride`` bytes."""

    run: RunShape
    offset: int
    token_stride: int


def _sizes(axes: Axes, tokens: int, elem: int) -> list[int]:
    whole = {"token": tokens, "elem": elem}
    return [size or whole[dim] // step for dim, size, step in axes]


def _text(axes: Axes, tokens: int, elem: int) -> str:
    sizes = _sizes(axes, tokens, elem)
    return ",".join(
        f"{dim}:{size}@{step}" for (dim, _, step), size in zip(axes, sizes, strict=True)
    )


def _cut(axes: Axes, piece: int, page: int, elem: int, item_bytes: int) -> Cut:
    """Tokens are cut along their outermost axis: what lies inside it stays together."""
    at, step = next((i, step) for i, (dim, _, step) in enumerate(axes) if dim == "token")
    sizes = _sizes(axes, page, elem)
    group = item_bytes * math.prod(sizes[at + 1 :])  # bytes of `step` tokens
    rows = math.prod(sizes[:at])
    run = RunShape(piece // step * group, rows, page // step * group if rows > 1 else 0)
    return Cut(run, 0, group // step)


#: K transposed, V in rows: the general vector kernels.
COLUMNS = PageOrder(
    "columns", 1, 1, (("elem", 0, 1), ("token", 0, 1)), (("token", 0, 1), ("elem", 0, 1))
)
#: Tiles of 16 lanes, each a pair of neighbours along the summed dimension: 16-bit matrix tiles (AMX).
PAIRS = PageOrder(
    "pairs",
    16,
    16,
    (("token", 0, 16), ("elem", 0, 2), ("token", 16, 1), ("elem", 2, 1)),
    (("elem", 0, 16), ("token", 0, 2), ("elem", 16, 1), ("token", 2, 1)),
)
KNOWN = (COLUMNS, PAIRS)


def find_order(dtype: str, tokens: int, elem: int, write: PageWriter) -> PageOrder | None:
    """The known order that explains a page of ``tokens`` x ``elem`` written by ``write``, if any."""
    plain = LayoutDescriptor.parse(f"{dtype}|kv:2,token:{tokens},elem:{elem}")
    numbers = _numbers(plain.item_bytes, 2 * tokens * elem)
    page = write(*np.split(numbers, 2))
    for order in KNOWN:
        if tokens % order.unit or elem % order.elem_unit:
            continue
        layout = LayoutDescriptor.parse(f"{dtype}|{order.axes(tokens, elem)}")
        expected = np.empty_like(numbers)
        Conversion(plain, layout).run(numbers, expected)
        if np.array_equal(page, expected):
            return order
    return None


def _numbers(item_bytes: int, count: int) -> Bytes:
    """``count`` elements, far from each other where equal; normal finite numbers of every type."""
    if item_bytes == 4:
        return (np.arange(count, dtype=np.float32) + 1).view(np.uint8)
    return (np.arange(count) % 30011 + 1024).astype(np.uint16).view(np.uint8)


def kernel_writer(dtype: torch.dtype, tokens: int, elem: int, isa: str) -> PageWriter:
    """vLLM's own writer of CPU pages, for one page and one head."""
    import torch
    from vllm import _custom_ops as ops

    def write(k: Bytes, v: Bytes) -> Bytes:
        keys, values = (
            torch.from_numpy(part.copy()).view(dtype).reshape(tokens, 1, elem) for part in (k, v)
        )
        page = torch.zeros((1, 1, 2 * tokens, elem), dtype=dtype)
        key_cache, value_cache = page.chunk(2, dim=2)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # no helper threads in a process that may still fork
        try:
            slots = torch.arange(tokens, dtype=torch.int64)
            ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
        finally:
            torch.set_num_threads(threads)
        written: Bytes = page.reshape(-1).view(torch.uint8).numpy()
        return written

    return write
