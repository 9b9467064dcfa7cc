"""Layout descriptors and conversion plans, against numpy transposes and against the definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.adapter.convert import Converter, CopyPlan, convertible, copy_plan, why_not
from ucm_core.adapter.layout import DIMS, Axis, LayoutDescriptor
from ucm_core.errors import UnsupportedError

parse = LayoutDescriptor.parse

# Pages of engines as this project meets them: 2 layers, 32 tokens, 4 heads of 8.
VLLM_CPU = parse(
    "bf16|layer:2,token:2@16,head:4,token:16,kv:2,elem:8"
)  # K and V fused, pages of 16
PAGE_FIRST = parse("bf16|kv:2,token:32,layer:2,head:4,elem:8")
PAGE_FIRST_DIRECT = parse("bf16|kv:2,layer:2,token:32,head:4,elem:8")
PAGE_HEAD = parse("bf16|kv:2,head:4,token:32,layer:2,elem:8")
HND = parse("bf16|layer:2,kv:2,head:4,token:32,elem:8")


def run_plan(plan: CopyPlan, source: np.ndarray, target: np.ndarray) -> None:
    """Natively, and by the plan's definition in numpy: both must write the same bytes."""
    reference = target.copy()
    strided = np.lib.stride_tricks.as_strided
    shape = (*plan.shape.tolist(), plan.run_bytes)
    a = strided(source[plan.source_offset :], shape, (*plan.source_strides.tolist(), 1))
    b = strided(reference[plan.target_offset :], shape, (*plan.target_strides.tolist(), 1))
    b[...] = a
    Converter(plan, len(source), len(target)).run(source, target)
    assert np.array_equal(target, reference)


def logical(layout: LayoutDescriptor) -> np.ndarray:
    """Element number in memory -> number of the logical element (layer, kv, token, head, elem)."""
    totals = [layout.total(dim) for dim in DIMS]
    out = []
    for index in itertools.product(*(range(axis.size) for axis in layout.axes)):
        where = dict.fromkeys(DIMS, 0)
        for axis, i in zip(layout.axes, index, strict=True):
            where[axis.dim] += i * axis.step
        out.append(np.ravel_multi_index([where[dim] for dim in DIMS], totals))
    return np.array(out)


def elements(layout: LayoutDescriptor, values: np.ndarray) -> np.ndarray:
    """The object's bytes when logical element i has value ``values[i]`` (uint16)."""
    return values[logical(layout)].view(np.uint8)


def check(source: LayoutDescriptor, target: LayoutDescriptor) -> None:
    values = np.arange(source.total_bytes // 2, dtype=np.uint16) * 257 + 3
    got = np.zeros(target.total_bytes, np.uint8)
    plan = copy_plan(source, target)
    run_plan(plan, elements(source, values), got)
    assert np.array_equal(got, elements(target, values))
    assert plan.runs * plan.run_bytes == target.total_bytes
    assert plan.is_straight == (source == target)


@pytest.mark.parametrize(
    "target", [VLLM_CPU, PAGE_FIRST, PAGE_FIRST_DIRECT, PAGE_HEAD, HND], ids=str
)
@pytest.mark.parametrize(
    "source", [VLLM_CPU, PAGE_FIRST, PAGE_FIRST_DIRECT, PAGE_HEAD, HND], ids=str
)
def test_between_engines(source: LayoutDescriptor, target: LayoutDescriptor) -> None:
    check(source, target)


def test_against_numpy_transpose() -> None:
    values = np.arange(2 * 2 * 32 * 4 * 8, dtype=np.uint16)
    stored = values.reshape(2, 2, 32, 4, 8)  # layer, kv, token, head, elem
    page_first = stored.transpose(1, 2, 0, 3, 4).copy()
    hnd = stored.transpose(0, 1, 3, 2, 4).copy()
    got = np.zeros_like(hnd)
    plan = copy_plan(PAGE_FIRST, HND)
    run_plan(plan, page_first.reshape(-1).view(np.uint8), got.reshape(-1).view(np.uint8))
    assert np.array_equal(got, hnd)
    assert plan.run_bytes == 16  # one head of one token


def test_runs_are_as_long_as_both_sides_allow() -> None:
    plan = copy_plan(PAGE_FIRST_DIRECT, parse("bf16|layer:2,kv:2,token:32,head:4,elem:8"))
    assert (plan.runs, plan.run_bytes) == (4, 32 * 4 * 8 * 2)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[LayoutDescriptor, LayoutDescriptor]:
    """Two orders of the same dimensions, each dimension whole or split in two or three."""
    sizes = {dim: draw(st.sampled_from([1, 2, 4, 8] if dim != "elem" else [1, 2])) for dim in DIMS}

    def one() -> LayoutDescriptor:
        axes = []
        for dim, size in sizes.items():
            step = 1
            while step < size:
                widths = [w for w in (2, 4, 8) if step * w < size]
                width = draw(st.sampled_from([*widths, *[size // step] * 3]))
                axes.append(Axis(dim, width, step))
                step *= width
        return LayoutDescriptor("bf16", tuple(draw(st.permutations(axes))))

    return one(), one()


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_random_orders(pair: tuple[LayoutDescriptor, LayoutDescriptor]) -> None:
    reason = why_not(*pair)
    if reason is None:
        check(*pair)
    else:
        assert "nested loops" in reason
    for layout in pair:
        assert parse(str(layout)) == layout
        assert hash(parse(str(layout))) == hash(layout)


def test_equal_orders_are_equal_descriptors() -> None:
    assert parse("bf16|layer:1,token:4@16,token:16,elem:8") == parse("bf16|token:64,elem:8")
    assert str(parse("bf16|token:4@16,kv:2,token:16,head:8,elem:64")) == (
        "bf16|token:4@16,kv:2,token:16,head:8,elem:64"
    )
    assert parse("bf16|token:4,elem:8") != parse("fp16|token:4,elem:8")
    assert parse("bf16|token:4,head:4") != parse("bf16|head:4,token:4")


def test_sizes_and_shards() -> None:
    assert VLLM_CPU.total_bytes == PAGE_FIRST.total_bytes == 2 * 2 * 32 * 4 * 8 * 2
    assert (VLLM_CPU.shard_count, VLLM_CPU.shard_bytes) == (2, 32 * 2 * 4 * 8 * 2)
    assert (PAGE_FIRST.shard_count, PAGE_FIRST.shard_bytes) == (1, 8192)
    assert parse("bf16|layer:2@2,token:4,layer:2").shard_count == 1
    assert parse("opaque.mamba2|layer:3,elem:100").total_bytes == 300
    assert parse("bf16|").total_bytes == 2


def test_padded_shards() -> None:
    """Inside a stored object each shard starts at a multiple of 4096."""
    values = np.arange(HND.total_bytes // 2, dtype=np.uint16)
    dense = elements(HND, values).reshape(2, -1)
    padded = np.zeros((2, 8192), np.uint8)
    padded[:, : dense.shape[1]] = dense
    small = parse("bf16|layer:2,kv:2,head:4,token:8,elem:8")  # 1 KiB a shard
    wide = parse("bf16|token:8,layer:2,kv:2,head:4,elem:8")
    small_values = np.arange(small.total_bytes // 2, dtype=np.uint16)
    stored = np.zeros((2, 4096), np.uint8)
    stored[:, :1024] = elements(small, small_values).reshape(2, 1024)
    got = np.zeros(wide.total_bytes, np.uint8)
    run_plan(copy_plan(small, wide, source_align=4096), stored.reshape(-1), got)
    assert np.array_equal(got, elements(wide, small_values))
    back = np.zeros(2 * 4096, np.uint8)
    run_plan(copy_plan(wide, small, target_align=4096), got, back)
    assert np.array_equal(back.reshape(2, 4096), stored)


@pytest.mark.parametrize("source", [PAGE_FIRST, PAGE_HEAD, VLLM_CPU], ids=str)
def test_a_reader_with_half_of_the_heads(source: LayoutDescriptor) -> None:
    """Another TP size: heads 2 and 3 of 4 out of the stored object, and back into it."""
    half = parse("bf16|layer:2,kv:2,head:2,token:32,elem:8")
    values = np.arange(source.total_bytes // 2, dtype=np.uint16)
    wanted = values.reshape(2, 2, 32, 4, 8)[:, :, :, 2:].reshape(-1)
    stored = elements(source, values)
    got = np.zeros(half.total_bytes, np.uint8)
    run_plan(copy_plan(source, half, source_begin={"head": 2}), stored, got)
    assert np.array_equal(got, elements(half, wanted))
    back = np.zeros_like(stored)
    for begin in (0, 2):
        run_plan(copy_plan(source, half, source_begin={"head": begin}), stored, got)
        run_plan(copy_plan(half, source, target_begin={"head": begin}), got, back)
    assert np.array_equal(back, stored)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("bf16|token:4,elem:8", "fp16|token:4,elem:8", "elements differ"),
        ("bf16|token:4,elem:8", "bf16|token:8,elem:8", "'token'"),
        ("bf16|token:3@2,elem:8,token:2", "bf16|token:2@3,elem:8,token:3", "do not fit"),
        ("opaque.a|token:4,elem:8", "opaque.a|elem:8,token:4", "no described order"),
        ("opaque.a|token:4,elem:8", "opaque.b|token:4,elem:8", "elements differ"),
    ],
)
def test_what_cannot_be_converted_says_why(source: str, target: str, reason: str) -> None:
    assert reason in (why_not(parse(source), parse(target)) or "")
    assert not convertible(parse(source), parse(target))


def test_part_that_is_no_whole_part() -> None:
    half = parse("bf16|head:2,elem:8")
    with pytest.raises(UnsupportedError, match="whole part"):
        copy_plan(parse("bf16|head:4,elem:8"), half, source_begin={"head": 1})
    with pytest.raises(UnsupportedError, match="do not fit"):
        copy_plan(parse("bf16|head:2@3,elem:8,head:3"), half, source_begin={"head": 2})


@pytest.mark.parametrize(
    "text",
    [
        "bf16",
        "float|token:4",
        "bf16|tokens:4",
        "bf16|token:0",
        "bf16|token:4@2",
        "bf16|token:4,token:4",
        "bf16|token:2@8,token:4",
        "bf16|token:4 ",
        "bf16|token:4,,elem:2",
        "opaque.|token:4",
        "|token:4",
    ],
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layout"):
        parse(text)


def test_regions_are_checked() -> None:
    plan = copy_plan(PAGE_FIRST, HND)
    n = HND.total_bytes
    with pytest.raises(UnsupportedError, match="refused"):
        Converter(plan, n, n - 1)
    with pytest.raises(UnsupportedError, match="refused"):
        Converter(copy_plan(HND, HND), n - 1, n)
    converter = Converter(plan, n, n)
    whole = np.zeros(n, np.uint8)
    with pytest.raises(ValueError, match="target is smaller"):
        converter.run(whole, whole[:-1].copy())
    with pytest.raises(ValueError, match="source is smaller"):
        converter.run(whole[:-1], np.zeros(n, np.uint8))
    with pytest.raises(TypeError):
        converter.run(np.zeros(2 * n, np.uint8)[::2], whole)
