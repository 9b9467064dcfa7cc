"""The engine's pages as runs and descriptors, against pages that are cut by hand."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ucm_core.adapter.blocks import BlockGrid, PageMap
from ucm_core.adapter.convert import why_not
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.errors import UnsupportedError
from ucm_core.store.contract import RunShape
from ucm_trtllm.pages import (
    Page,
    fitting_block_tokens,
    is_shared,
    object_layout,
    page_grid,
    piece_runs,
    plain_page,
)


def read(address: int, run: RunShape) -> bytes:
    return b"".join(
        ctypes.string_at(address + i * run.stride, run.nbytes) for i in range(run.count)
    )


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("block_tokens", [8, 16, 32, 48, 64])
@pytest.mark.parametrize("heads", [(0, 4), (0, 2), (2, 4), (1, 2)])
def test_runs_are_what_the_descriptor_says(
    latent: bool, block_tokens: int, heads: tuple[int, int]
) -> None:
    """Two layers in pages of 32: gathered bytes are K before V, heads before tokens, piece after piece."""
    total, size, tokens = (1, 6, 32) if latent else (4, 6, 32)
    if latent:
        heads = (0, 1)
    kv = 1 if latent else 2
    pool = np.arange(8 * 2 * kv * total * tokens * size, dtype=np.float32)
    pool = pool.reshape(8, 2, kv, total, tokens, size)
    page = Page(
        total, tokens, size, 4 * size, "fp32", None if latent else total * tokens * size * 4
    )
    grid = page_grid(page, block_tokens)
    runs = piece_runs(page, grid, heads)
    bases = np.array([pool[0, layer].ctypes.data for layer in range(2)], np.uint64)
    pages = PageMap(grid, bases, pool.strides[0], runs)
    table = np.array([5, 2, 7, 0])
    blocks = np.arange(128 // block_tokens)
    rows = pages.addresses(grid.pages(table, blocks), blocks)
    count = heads[1] - heads[0]
    layout = object_layout(page, grid, 2, count)
    assert layout.shard_bytes == runs.nbytes * grid.pieces
    for block in blocks:
        for layer in range(2):
            row = rows[block * 2 + layer]
            got = b"".join(
                read(int(address), runs.shapes[i % len(runs.shapes)])
                for i, address in enumerate(row)
            )
            first = block * block_tokens
            parts = []
            for start in range(first, first + block_tokens, grid.piece_tokens):
                held = pool[table[start // tokens], layer, :, heads[0] : heads[1]]
                at = start % tokens
                parts.append(held[:, :, at : at + grid.piece_tokens].tobytes())
            assert got == b"".join(parts)


@pytest.mark.parametrize(
    "other",
    [
        "fp32|layer:2,token:2@32,head:4,kv(elem:8,token:32;token:32,elem:8)",
        "fp32|layer:2,token:64,head:4,kv:2,elem:8",
        "fp32|kv:2,layer:2,token:64,head:4,elem:8",
        "fp32|kv:2,token:64,layer:2,head:4,elem:8",
    ],
    ids=["vLLM on the CPU", "rows", "page_first_direct", "page_first"],
)
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
def test_orders_of_other_engines_convert(other: str, tokens: int) -> None:
    page = Page(4, tokens, 8, 32, "fp32", 4 * tokens * 32)
    ours = object_layout(page, BlockGrid(64, tokens), 2, 4)
    theirs = LayoutDescriptor.parse(other)
    assert why_not(theirs, ours) is None and why_not(ours, theirs) is None
    assert is_shared(ours)


def test_latent_rows_are_the_same_bytes_whatever_the_page() -> None:
    rows = {
        str(object_layout(Page(1, n, 576, 1152, "bf16"), BlockGrid(64, n), 3, 1))
        for n in (16, 32, 64)
    }
    assert rows == {"bf16|layer:3,token:64,elem:576"}


def test_packed_elements_move_as_whole_pages() -> None:
    page = plain_page(
        heads=2, head_size=64, dtype="nvfp4", part_bytes=2048, tokens=32, value_offset=2048
    )
    assert page.opaque and page.tokens == 32 and page.cell_bytes == 32
    assert fitting_block_tokens(page, 64, whole=False) == 64
    assert fitting_block_tokens(page, 16, whole=False) == 32
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        page_grid(page, 16)
    layout = object_layout(page, page_grid(page, 64), 4, 2)
    assert layout.opaque and not is_shared(layout)
    assert layout.shard_bytes == piece_runs(page, page_grid(page, 64), (0, 2)).nbytes * 2


@pytest.mark.parametrize(
    ("dtype", "nbytes", "tokens", "reason"),
    [
        ("fp32", 1000, None, "no whole number"),
        ("fp32", 2048, 32, "the 32 tokens that were registered"),
        ("float64", 2048, None, "size is not known"),
    ],
)
def test_sizes_that_contradict(dtype: str, nbytes: int, tokens: int | None, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        plain_page(
            heads=2, head_size=16, dtype=dtype, part_bytes=nbytes, tokens=tokens, value_offset=None
        )


def test_uneven_splits_stay_private() -> None:
    page = Page(4, 48, 8, 32, "fp32", 4 * 48 * 32)
    assert not is_shared(object_layout(page, BlockGrid(192, 48), 1, 4))
