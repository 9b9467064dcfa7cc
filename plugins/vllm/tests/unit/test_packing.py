"""Orders of packed pages: found by asking the engine's writer, cut for other block sizes, shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from ucm_core.adapter.blocks import PageMap
from ucm_core.adapter.convert import Conversion, why_not
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.errors import UnsupportedError
from ucm_core.identity import Manifest, ModelIdentity
from ucm_vllm.facts import Facts, PageKind
from ucm_vllm.lanes import Lane
from ucm_vllm.messages import RowBlocks
from ucm_vllm.packing import COLUMNS, KNOWN, PAIRS, Bytes, PageOrder, find_order, kernel_writer
from ucm_vllm.page_layout import fitting_block_tokens, is_shared
from ucm_vllm.placement import Placement

IDENTITY = ModelIdentity(weights="id:x", kv_dtype="bf16")
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _tiles(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A page as AMX kernels keep it, written out: pairs of the summed dimension beside each other."""
    tokens, elem = k.shape
    k = k.reshape(tokens // 16, 16, elem // 2, 2).transpose(0, 2, 1, 3)
    v = v.reshape(tokens // 2, 2, elem // 16, 16).transpose(2, 0, 3, 1)
    return np.concatenate([k.reshape(-1), v.reshape(-1)])


def _columns(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.concatenate([k.T.reshape(-1), v.reshape(-1)])


def _writer(pack, item: int, tokens: int, elem: int):  # type: ignore[no-untyped-def]
    kind = {2: np.uint16, 4: np.uint32}[item]

    def write(k: Bytes, v: Bytes) -> Bytes:
        page = pack(*(part.view(kind).reshape(tokens, elem) for part in (k, v)))
        return np.ascontiguousarray(page).view(np.uint8)

    return write


@pytest.mark.parametrize(("pack", "order"), [(_tiles, PAIRS), (_columns, COLUMNS)])
@pytest.mark.parametrize("item", [2, 4])
def test_an_order_is_found_by_what_the_writer_writes(pack, order: PageOrder, item: int) -> None:  # type: ignore[no-untyped-def]
    dtype = {2: "bf16", 4: "fp32"}[item]
    assert find_order(dtype, 64, 32, _writer(pack, item, 64, 32)) is order


def test_a_page_that_no_order_explains_stays_opaque() -> None:
    def one_pair_swapped(k: np.ndarray, v: np.ndarray) -> np.ndarray:
        page = _columns(k, v)
        page[[700, 701]] = page[[701, 700]]
        return page

    assert find_order("fp32", 32, 32, _writer(one_pair_swapped, 4, 32, 32)) is None
    # A tile of 16 lanes does not fit a head size of 40.
    assert find_order("bf16", 32, 40, _writer(_columns, 2, 32, 40)) is COLUMNS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "elem"), [(32, 64), (64, 64), (128, 128), (32, 80), (96, 32)])
def test_the_kernels_of_this_machine_write_a_known_order(
    dtype: torch.dtype, tokens: int, elem: int
) -> None:
    """The real kernel; on a machine whose kernels nobody has described the pages stay opaque."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, tokens, elem, "auto")
    order = find_order(DTYPES[dtype], tokens, elem, kernel_writer(dtype, tokens, elem, isa))
    if order is None:
        pytest.skip(f"the {isa} kernel of this machine packs in an order that is not described")
    assert order is {"vec": COLUMNS, "vec16": COLUMNS, "amx": PAIRS}.get(isa, order)


def _packed(engine_block: int, order: PageOrder | None = COLUMNS, **changes: Any) -> Facts:
    kind = PageKind(
        kind="full",
        engine_block=engine_block,
        heads=2,
        total_heads=2,
        head_size=32,
        head_size_v=32,
        cell_bytes=128,
        dtype="bfloat16",
        packing="cpu_attn-test",
        page_order=order,
    )
    return Facts(
        kinds=(replace(kind, **changes),),
        kind_of=(0, 0),
        tables=(0,),
        table_of={0: 0, 1: 0},
        kv_cache_dtype="auto",
        physical_order="LBHNC",
        stages=((0, 2),),
        tp=1,
    )


def _place(facts: Facts, block_tokens: int) -> Placement:
    return Placement.build(facts, IDENTITY, Manifest("n", block_tokens, 1), "bf16")


def _object(placement: Placement, memory: np.ndarray, table: np.ndarray, block: int) -> np.ndarray:
    """The bytes that a dump of stored block ``block`` collects from ``memory[layer, page, ...]``."""
    (at,) = placement.all()
    runs, grid = placement.runs(at), placement.rows[0].grid
    base = memory.ctypes.data
    bases = np.array([base + i * memory[0].nbytes for i in range(len(memory))], dtype=np.uint64)
    pages = PageMap(grid, bases, memory[0, 0].nbytes, runs)
    blocks = np.array([block])
    rows = pages.addresses(grid.pages(table, blocks), blocks)
    flat, out = memory.reshape(-1).view(np.uint8), []
    for row in rows:
        for j, address in enumerate(row):
            run, first = runs.shapes[j % len(runs.shapes)], int(address) - base
            out += [
                flat[first + i * run.stride : first + i * run.stride + run.nbytes]
                for i in range(run.count)
            ]
    return np.concatenate(out)


def _memory(
    keys: np.ndarray, values: np.ndarray, block: int, pack, table: np.ndarray
) -> np.ndarray:  # type: ignore[no-untyped-def]
    """vLLM's pages ``[layer, page, head, ...]`` of keys and values ``[layer, token, head, elem]``."""
    layers, tokens, heads, elem = keys.shape
    out = np.zeros((layers, int(table.max()) + 1, heads, 2 * block * elem), np.uint16)
    for page, number in enumerate(table[: tokens // block]):
        part = slice(page * block, (page + 1) * block)
        for layer in range(layers):
            for head in range(heads):
                out[layer, number, head] = pack(keys[layer, part, head], values[layer, part, head])
    return out


@pytest.mark.parametrize("block_tokens", [64, 128])
@pytest.mark.parametrize(
    "to", [(32, COLUMNS), (64, COLUMNS), (128, COLUMNS), (64, PAIRS), (128, PAIRS)]
)
@pytest.mark.parametrize("saved", [(32, COLUMNS), (128, COLUMNS), (32, PAIRS), (128, PAIRS)])
def test_what_one_block_size_and_kernel_saves_fits_another(
    saved: tuple[int, PageOrder], to: tuple[int, PageOrder], block_tokens: int
) -> None:
    rng = np.random.default_rng(5)
    keys, values = rng.integers(0, 1 << 16, (2, 2, 256, 2, 32)).astype(np.uint16)
    stored: list[np.ndarray] = []
    layouts: list[LayoutDescriptor] = []
    seeds = set()
    for engine_block, order in (saved, to):
        placement = _place(_packed(engine_block, order), block_tokens)
        pack = _columns if order is COLUMNS else _tiles
        table = rng.permutation(np.arange(1, 1 + 256 // engine_block))
        memory = _memory(keys, values, engine_block, pack, table)
        stored.append(_object(placement, memory, table, 1))
        (at,) = placement.all()
        layouts.append(placement.layout(at))
        seeds.add(at.seed)
        assert is_shared(layouts[-1])
    assert len(seeds) == 1
    conversion = Conversion(*layouts)
    got = np.zeros(conversion.target_bytes, np.uint8)
    conversion.run(stored[0], got)
    assert np.array_equal(got, stored[1])
    same_pages = saved[1] is to[1] and min(saved[0], block_tokens) == min(to[0], block_tokens)
    assert conversion.is_straight == same_pages
    # The control: taken as they are, the bytes would be wrong.
    assert np.array_equal(stored[0], stored[1]) == same_pages


def test_a_lane_hands_the_store_every_run_of_a_cut_page() -> None:
    placement = _place(_packed(128), 64)
    (at,) = placement.all()
    pages = PageMap(
        placement.rows[0].grid,
        np.array([1 << 20, 1 << 21], dtype=np.uint64),
        1 << 14,
        placement.runs(at),
    )
    lane = Lane(row=0, store=MagicMock(), seed=at.seed, pages=pages, block_bytes=1)
    part = RowBlocks(0, np.zeros((3, 32), np.uint8), np.array([0, 1, 2]), np.array([[5], [5], [7]]))
    transfer = lane.transfer(part)
    assert transfer.addresses.shape == (3, 2, 4)  # K and V of two heads
    k, v = 64 * 2, 64 * 32 * 2  # the second half of a page: rows of 64 tokens in K, tokens in V
    head = 128 * 32 * 2 * 2
    first = transfer.addresses[0, 0].astype(np.int64) - (1 << 20) - 5 * (1 << 14)
    second = transfer.addresses[1, 0].astype(np.int64) - (1 << 20) - 5 * (1 << 14)
    assert first.tolist() == [0, head // 2, head, head + head // 2]
    assert (second - first).tolist() == [k, v, k, v]


def test_tiles_are_not_cut() -> None:
    with pytest.raises(UnsupportedError, match="packed by the CPU kernel"):
        _place(_packed(32, PAIRS), 24)
    assert _place(_packed(32, COLUMNS), 24).rows[0].grid.piece_tokens == 8
    assert fitting_block_tokens(_packed(128), 64) == 64
    assert fitting_block_tokens(_packed(128, None), 64) == 128
    with pytest.raises(UnsupportedError, match="one tile"):
        PAIRS.cut(8, 32, 32, 2)


def test_orders_that_not_everybody_can_convert_are_kept_apart() -> None:
    def layout(facts: Facts, block_tokens: int) -> LayoutDescriptor:
        placement = _place(facts, block_tokens)
        return placement.layout(placement.all()[0])

    thirds, quarters = layout(_packed(64), 192), layout(_packed(48), 192)
    assert why_not(quarters, thirds) is not None
    assert is_shared(thirds)
    assert not is_shared(quarters)
    assert is_shared(layout(_packed(192), 192))
    opaque = layout(_packed(64, None), 64)
    assert opaque.opaque
    assert not is_shared(opaque)
    rows = replace(_packed(48, None, packing=""), physical_order="LBNHC")
    assert is_shared(layout(rows, 192)), "rows are rows in pages of any size"


def test_every_known_order_counts_each_element_once() -> None:
    for order in KNOWN:
        layout = LayoutDescriptor.parse(f"bf16|{order.axes(64, 32)}")
        assert layout.total_bytes == 2 * 64 * 32 * 2
