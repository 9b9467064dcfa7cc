"""Layout descriptors and conversions (native), against numpy transposes and against the definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_core.adapter.convert import Conversion, why_not
from ucm_core.adapter.layout import DIMS, ITEM_BYTES, LayoutDescriptor

parse = LayoutDescriptor.parse

# Pages of engines as this project meets them: 2 layers, 32 tokens, 4 heads of 8.
# (As text: what the native module made does not outlive it.)
VLLM_CPU = "bf16|layer:2,token:2@16,head:4,token:16,kv:2,elem:8"  # K and V fused, pages of 16
PAGE_FIRST = "bf16|kv:2,token:32,layer:2,head:4,elem:8"
PAGE_FIRST_DIRECT = "bf16|kv:2,layer:2,token:32,head:4,elem:8"
PAGE_HEAD = "bf16|kv:2,head:4,token:32,layer:2,elem:8"
HND = "bf16|layer:2,kv:2,head:4,token:32,elem:8"
PACKED = "bf16|layer:2,token:2@16,head:4,kv(elem:8,token:16;token:16,elem:8)"
ALL = [VLLM_CPU, PAGE_FIRST, PAGE_FIRST_DIRECT, PAGE_HEAD, HND, PACKED]

Axes = list[tuple[str, int, int]]


def branches(layout: LayoutDescriptor) -> tuple[Axes, list[Axes]]:
    """Outer axes and inner ones (none, or of K and of V) as (dim, size, step), from the text."""

    def axes(text: str) -> Axes:
        out = []
        for word in filter(None, text.split(",")):
            dim, _, size = word.partition(":")
            count, _, step = size.partition("@")
            out.append((dim, int(count), int(step or 1)))
        return out

    rest = str(layout).partition("|")[2]
    outer, fork, inner = rest.partition("kv(")
    return axes(outer), [axes(part) for part in inner.rstrip(")").split(";")] if fork else []


def logical(layout: LayoutDescriptor) -> np.ndarray:
    """Element number in memory -> number of the logical element (layer, kv, token, head, elem)."""
    totals = [layout.total(dim) for dim in DIMS]
    outer, inner = branches(layout)
    out = []
    for index in itertools.product(*(range(size) for _, size, _ in outer)):
        for kv, axes in enumerate(inner or [[]]):
            for below in itertools.product(*(range(size) for _, size, _ in axes)):
                where = dict.fromkeys(DIMS, 0) | {"kv": kv}
                for (dim, _, step), i in zip([*outer, *axes], [*index, *below], strict=True):
                    where[dim] += i * step
                out.append(np.ravel_multi_index([where[dim] for dim in DIMS], totals))
    return np.array(out)


def elements(layout: LayoutDescriptor, values: np.ndarray) -> np.ndarray:
    """The object's bytes when logical element i has value ``values[i]`` (uint16)."""
    return values[logical(layout)].view(np.uint8)


def converted(conversion: Conversion, source: np.ndarray) -> np.ndarray:
    target = np.zeros(conversion.target_bytes, np.uint8)
    conversion.run(source, target)
    return target


def check(source: LayoutDescriptor, target: LayoutDescriptor) -> None:
    values = np.arange(source.total_bytes // 2, dtype=np.uint16) * 257 + 3
    conversion = Conversion(source, target)
    got = converted(conversion, elements(source, values))
    assert np.array_equal(got, elements(target, values))
    assert source != target or conversion.is_straight


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ALL)
def test_between_engines(source: str, target: str) -> None:
    check(parse(source), parse(target))


def test_another_order_is_other_bytes() -> None:
    """The control: without a conversion each pair differs, though all hold the same elements."""
    values = np.arange(parse(PACKED).total_bytes // 2, dtype=np.uint16)
    for a, b in itertools.combinations(map(parse, ALL), 2):
        assert not np.array_equal(elements(a, values), elements(b, values)), (a, b)


def test_against_numpy_transpose() -> None:
    values = np.arange(2 * 2 * 32 * 4 * 8, dtype=np.uint16)
    stored = values.reshape(2, 2, 32, 4, 8)  # layer, kv, token, head, elem
    page_first = stored.transpose(1, 2, 0, 3, 4).copy()
    hnd = stored.transpose(0, 1, 3, 2, 4).copy()
    got = converted(
        Conversion(parse(PAGE_FIRST), parse(HND)), page_first.reshape(-1).view(np.uint8)
    )
    assert np.array_equal(got, hnd.reshape(-1).view(np.uint8))


def test_packed_pages_against_numpy() -> None:
    """Per page and head: K as [elem, token], then V as [token, elem]."""
    values = np.arange(2 * 2 * 32 * 4 * 8, dtype=np.uint16)
    pages = values.reshape(2, 2, 2, 16, 4, 8)  # layer, kv, page, token, head, elem
    k, v = pages[:, 0], pages[:, 1]
    k = k.transpose(0, 1, 3, 4, 2).reshape(2, 2, 4, -1)
    v = v.transpose(0, 1, 3, 2, 4).reshape(2, 2, 4, -1)
    packed = np.concatenate([k, v], axis=-1)
    page_first = values.reshape(2, 2, 32, 4, 8).transpose(1, 2, 0, 3, 4).copy()
    packed_pages = parse(PACKED)
    got = converted(
        Conversion(parse(PAGE_FIRST), packed_pages), page_first.reshape(-1).view(np.uint8)
    )
    assert np.array_equal(got, packed.reshape(-1).view(np.uint8))
    wide = parse("bf16|layer:2,head:4,kv(elem:8,token:32;token:32,elem:8)")
    again = converted(
        Conversion(wide, packed_pages), converted(Conversion(packed_pages, wide), got)
    )
    assert np.array_equal(again, got)


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
                axes.append(f"{dim}:{width}@{step}")
                step *= width
        return parse("bf16|" + ",".join(draw(st.permutations(axes))))

    return one(), one()


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_random_orders(pair: tuple[LayoutDescriptor, LayoutDescriptor]) -> None:
    check(*pair)
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
    pages, page_first = parse(VLLM_CPU), parse(PAGE_FIRST)
    assert pages.total_bytes == page_first.total_bytes == 2 * 2 * 32 * 4 * 8 * 2
    assert (pages.shard_count, pages.shard_bytes) == (2, 32 * 2 * 4 * 8 * 2)
    assert (page_first.shard_count, page_first.shard_bytes) == (1, 8192)
    assert parse("bf16|layer:2@2,token:4,layer:2").shard_count == 1
    assert parse("opaque.mamba2|layer:3,elem:100").total_bytes == 300
    assert parse("bf16|").total_bytes == 2


def test_padded_shards() -> None:
    """Inside a stored object each shard starts at a multiple of 4096."""
    small = parse("bf16|layer:2,kv:2,head:4,token:8,elem:8")  # 1 KiB a shard
    wide = parse("bf16|token:8,layer:2,kv:2,head:4,elem:8")
    values = np.arange(small.total_bytes // 2, dtype=np.uint16)
    stored = np.zeros((2, 4096), np.uint8)
    stored[:, :1024] = elements(small, values).reshape(2, 1024)
    got = converted(Conversion(small, wide, source_align=4096), stored.reshape(-1))
    assert np.array_equal(got, elements(wide, values))
    back = converted(Conversion(wide, small, target_align=4096), got)
    assert np.array_equal(back.reshape(2, 4096), stored)


def test_one_shard_of_several() -> None:
    conversion = Conversion(parse(PAGE_FIRST), parse(HND))
    source = np.arange(parse(PAGE_FIRST).total_bytes, dtype=np.uint8)
    whole = converted(conversion, source)
    part = np.zeros_like(whole)
    conversion.run(source, part, 1, 2)
    half = len(whole) // 2
    assert not part[:half].any()
    assert np.array_equal(part[half:], whole[half:])


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


def test_item_sizes_are_those_of_the_native_parser() -> None:
    for name, size in ITEM_BYTES.items():
        assert parse(f"{name}|elem:4").total_bytes == 4 * size


def test_regions_are_checked() -> None:
    n = parse(HND).total_bytes
    conversion = Conversion(parse(PAGE_FIRST), parse(HND))
    whole = np.zeros(n, np.uint8)
    with pytest.raises(ValueError, match="target is smaller"):
        conversion.run(whole, whole[:-1].copy())
    with pytest.raises(ValueError, match="source is smaller"):
        conversion.run(whole[:-1], np.zeros(n, np.uint8))
    with pytest.raises(ValueError, match="outside"):
        conversion.run(whole, np.zeros(n, np.uint8), 0, 3)
    with pytest.raises(TypeError):
        conversion.run(np.zeros(2 * n, np.uint8)[::2], whole)
