"""Block-table arithmetic against a token-by-token oracle over a real buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.adapter.blocks import NO_PAGE, BlockGrid, PageMap, PageShape, PieceRuns
from ucm_core.errors import UnsupportedError
from ucm_core.store.contract import RunShape

CELL = 4


def _rows(token_stride: int) -> PieceRuns:
    """Pieces of 16 tokens that are one run."""
    return PieceRuns.single(RunShape(16 * token_stride), 0, token_stride)


def _pool(layers: int, blocks: int, page: PageShape) -> np.ndarray:
    rng = np.random.default_rng(3)
    size = page.heads * page.tokens * page.cell_bytes
    return rng.integers(0, 256, (layers, blocks, size), dtype=np.uint8)


def _read(pool: np.ndarray, address: int, run) -> bytes:  # type: ignore[no-untyped-def]
    flat = pool.reshape(-1)
    at = address - pool.ctypes.data
    return b"".join(
        flat[at + i * run.stride : at + i * run.stride + run.nbytes].tobytes()
        for i in range(run.count)
    )


def _cells(
    pool: np.ndarray, page: PageShape, layer: int, block: int, token: int, head: int
) -> bytes:
    at = head * page.head_stride + token * page.token_stride
    return pool[layer, block, at : at + page.cell_bytes].tobytes()


def _page(order: str, heads: int, tokens: int) -> PageShape:
    if order == "head-major":
        return PageShape(heads, tokens, CELL, tokens * CELL, CELL)
    return PageShape(heads, tokens, CELL, CELL, heads * CELL)


@settings(max_examples=60, deadline=None)
@given(
    block_tokens=st.sampled_from([4, 8, 12, 16]),
    engine_block=st.sampled_from([4, 8, 12, 16, 32]),
    order=st.sampled_from(["head-major", "token-major"]),
    heads=st.sampled_from([(0, 3), (0, 1), (1, 3)]),
    seed=st.integers(0, 2**16),
)
def test_every_run_holds_exactly_its_tokens(
    block_tokens: int, engine_block: int, order: str, heads: tuple[int, int], seed: int
) -> None:
    grid = BlockGrid(block_tokens, engine_block)
    page = _page(order, 3, engine_block)
    layers, n_tokens = 2, 96
    pool = _pool(layers, 40, page)
    table = np.random.default_rng(seed).permutation(39)[: n_tokens // engine_block] + 1
    run, offset = page.run(grid.piece_tokens, heads)
    page_bytes = pool.shape[2]
    bases = np.array([pool[i].ctypes.data for i in range(layers)], dtype=np.uint64)
    pages = PageMap(grid, bases, page_bytes, PieceRuns.single(run, offset, page.token_stride))
    blocks = np.array([1, 3, 5], dtype=np.int64)
    addresses = pages.addresses(grid.pages(table.astype(np.int64), blocks), blocks)
    assert addresses.dtype == np.uint64
    assert addresses.flags["C_CONTIGUOUS"]
    assert addresses.shape == (len(blocks) * layers, grid.pieces)
    assert list(pages.shards(len(blocks))) == [0, 1] * len(blocks)
    for row, (block, layer) in enumerate((int(b), i) for b in blocks for i in range(layers)):
        for piece in range(grid.pieces):
            first = block * block_tokens + piece * grid.piece_tokens
            tokens = range(first, first + grid.piece_tokens)
            where = [(table[t // engine_block], t % engine_block) for t in tokens]
            wanted = [
                _cells(pool, page, layer, int(p), at, h)
                for p, at, h in (
                    [(p, at, h) for h in range(*heads) for p, at in where]
                    if order == "head-major"
                    else [(p, at, h) for p, at in where for h in range(*heads)]
                )
            ]
            assert _read(pool, int(addresses[row, piece]), run) == b"".join(wanted)


def test_pieces_outside_the_tokens_of_a_load_are_skipped() -> None:
    grid = BlockGrid(64, 16)
    pages = PageMap(grid, np.array([1 << 20, 1 << 21], dtype=np.uint64), 1000, _rows(10))
    table = np.arange(1, 12, dtype=np.int64)  # ends before token 176 + 16
    blocks = np.array([1, 2])
    addresses = pages.addresses(grid.pages(table, blocks, 176), blocks, 96, 176)
    assert (addresses[:2, :2] == 0).all()
    assert (addresses[:2, 2:] != 0).all()
    assert (addresses[2:, :3] != 0).all()
    assert (addresses[2:, 3:] == 0).all()  # from token 176 on the engine computes


def test_a_table_that_is_too_short_is_an_error_not_a_wrong_page() -> None:
    grid = BlockGrid(64, 32)
    with pytest.raises(ValueError, match="does not reach stored block 2"):
        grid.pages(np.arange(5, dtype=np.int64), np.array([2]))


def test_opaque_pages_are_never_cut_between_tokens() -> None:
    page = PageShape(2, 128, CELL, 128 * CELL, CELL, opaque=True)
    with pytest.raises(UnsupportedError, match="multiple of 128"):
        page.run(64, (0, 2))
    run, offset = page.run(128, (1, 2))
    assert (run.nbytes, run.count, offset) == (128 * CELL, 1, 128 * CELL)


def test_padded_rows_of_a_single_head_become_a_strided_run() -> None:
    page = PageShape(1, 16, 6, 16 * 8, 8)
    run, _ = page.run(16, (0, 1))
    assert (run.nbytes, run.count, run.stride) == (6, 16, 8)
    with pytest.raises(UnsupportedError, match="neither"):
        PageShape(2, 16, 6, 16 * 8, 8).run(16, (0, 2))


def test_layers_of_one_row_may_use_several_block_tables() -> None:
    """Layers 0 and 2 use the first table, layer 1 the second, which has no page for token 0 to 15."""
    grid = BlockGrid(32, 16)
    bases = np.array([1000, 2000, 3000], dtype=np.uint64)
    pages = PageMap(grid, bases, 100, _rows(5), tables=np.array([0, 1, 0]))
    blocks = np.array([0])
    tables = [grid.pages(np.array([4, 7]), blocks), grid.pages(np.array([NO_PAGE, 9]), blocks)]
    addresses = pages.addresses(np.stack(tables, axis=1), blocks)
    assert addresses.tolist() == [[1400, 1700], [0, 2900], [3400, 3700]]


def test_a_table_of_one_row_is_the_table_of_all_layers() -> None:
    grid = BlockGrid(32, 16)
    pages = PageMap(grid, np.array([1000, 2000], dtype=np.uint64), 100, _rows(5))
    table = grid.pages(np.array([4, NO_PAGE]), np.array([0]))
    for shape in (table, table[:, None, :]):
        assert pages.addresses(shape, np.array([0])).tolist() == [[1400, 0], [2400, 0]]
