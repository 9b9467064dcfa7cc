"""Pages of real host pools through the backend: bytes, results, layouts, head slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from host_pools import HEADS, Rank, gqa_pool, keys, mla_pool, same, serve

GQA_LAYOUTS = ("page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("page_first", "page_first_direct")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Backends over one directory; closed at the end."""
    made: list[Rank] = []

    def make(**how: Any) -> Rank:
        made.append(Rank(tmp_path / "kv", **how))
        return made[-1]

    serve()
    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("layout", GQA_LAYOUTS)
def test_pages_survive_their_process(rank: Callable[..., Rank], layout: str) -> None:
    writer = rank(pool=gqa_pool(layout))
    source = writer.fill(5)
    assert writer.backend.batch_exists(keys(5)) == 0
    assert writer.backend.batch_set_v1(keys(5), source) == [True] * 5
    reader = rank(pool=gqa_pool(layout))
    assert reader.backend.batch_exists(keys(7)) == 5
    target = reader.empty(7)
    assert reader.backend.batch_get_v1(keys(7), target) == [True] * 5 + [False] * 2
    assert same(reader.pages(target)[:5], writer.pages(source))
    counters = reader.backend.counters()
    assert counters["load_pages"] == 5
    assert counters["load_failed_pages|miss"] == 2


@pytest.mark.parametrize("saved", GQA_LAYOUTS)
@pytest.mark.parametrize("served", GQA_LAYOUTS)
def test_layouts_convert(rank: Callable[..., Rank], saved: str, served: str) -> None:
    """A page means the same in every layout: compared through SGLang's own view of K and V."""
    writer, reader = rank(pool=gqa_pool(saved)), rank(pool=gqa_pool(served))
    source, target = writer.fill(3), reader.empty(3)
    assert all(writer.backend.batch_set_v1(keys(3), source))
    assert all(reader.backend.batch_get_v1(keys(3), target))
    assert same(logical(reader, target), logical(writer, source))


def logical(rank: Rank, indices: Any) -> list[Any]:
    """Pages as ``[kv, token, layer, head, elem]``."""
    pool, found = rank.pool, []
    orders = {
        "page_first": (0, 1, 2, 3, 4),
        "page_first_direct": (0, 2, 1, 3, 4),
        "page_head": (0, 2, 3, 1, 4),
    }
    sizes = {
        "page_first": ("t", "l", "h"),
        "page_first_direct": ("l", "t", "h"),
        "page_head": ("h", "t", "l"),
    }
    size = {"t": pool.page_size, "l": pool.layer_num, "h": pool.head_num}
    for page in rank.pages(indices):
        shape = (2, *(size[axis] for axis in sizes[pool.layout]), pool.head_dim)
        found.append(page.reshape(shape).permute(orders[pool.layout]).contiguous())
    return found


@pytest.mark.parametrize("saved", MLA_LAYOUTS)
@pytest.mark.parametrize("served", MLA_LAYOUTS)
def test_latent_pages(rank: Callable[..., Rank], saved: str, served: str) -> None:
    serve("deepseek_v3")
    told = {"is_mla_model": True}
    writer, reader = rank(pool=mla_pool(saved), told=told), rank(pool=mla_pool(served), told=told)
    source, target = writer.fill(3), reader.empty(3)
    assert all(writer.backend.batch_set_v1(keys(3), source))
    assert all(reader.backend.batch_get_v1(keys(3), target))

    def rows(rank: Rank, indices: Any) -> list[Any]:
        pool, direct = rank.pool, rank.pool.layout == "page_first_direct"
        first = (pool.layer_num, pool.page_size) if direct else (pool.page_size, pool.layer_num)
        pages = [page.reshape(*first, pool.kv_cache_dim) for page in rank.pages(indices)]
        return [page.transpose(0, 1).contiguous() if direct else page for page in pages]

    assert same(rows(reader, target), rows(writer, source))


def test_latent_pages_are_the_same_on_every_rank(rank: Callable[..., Rank]) -> None:
    """B35: one writer, rank 0; every rank of any tensor parallelism reads what it wrote."""
    serve("deepseek_v3")
    writer = rank(pool=mla_pool(), told={"is_mla_model": True, "tp_size": 2})
    source = writer.fill(3)
    assert all(writer.backend.batch_set_v1(keys(3), source))
    for tp_rank, tp_size in ((1, 2), (0, 1), (3, 4)):
        told = {"is_mla_model": True, "tp_size": tp_size, "tp_rank": tp_rank}
        reader = rank(pool=mla_pool(), told=told)
        target = reader.empty(3)
        assert all(reader.backend.batch_get_v1(keys(3), target)), told
        assert same(reader.pages(target), writer.pages(source))


SLICED = {"namespace": "shared", "head_slices": 2}


@pytest.mark.parametrize("layout", GQA_LAYOUTS)
def test_head_slices_go_to_another_tensor_parallelism(
    rank: Callable[..., Rank], layout: str
) -> None:
    whole = rank(pool=gqa_pool(layout), options=SLICED)
    halves = [
        rank(pool=gqa_pool(layout, heads=1), options=SLICED, told={"tp_size": 2, "tp_rank": r})
        for r in range(2)
    ]
    source = whole.fill(3)
    assert all(whole.backend.batch_set_v1(keys(3), source))
    wanted = logical(whole, source)
    for number, half in enumerate(halves):
        target = half.empty(3)
        assert all(half.backend.batch_get_v1(keys(3), target))
        part = [page[:, :, :, number : number + 1].contiguous() for page in wanted]
        assert same(logical(half, target), part)
    # And back: each rank saves its half of another prompt, one rank reads both.
    other = keys(3, seed=9)
    for half in halves:
        assert all(half.backend.batch_set_v1(other, half.fill(3)))
        if half is halves[0]:
            assert whole.backend.batch_exists(other) == 0, "half of the heads is no page"
    target = whole.empty(3)
    assert all(whole.backend.batch_get_v1(other, target))
    for number, half in enumerate(halves):
        got = [page[:, :, :, number : number + 1].contiguous() for page in logical(whole, target)]
        assert same(got, logical(half, half.fill(3)))


def test_more_ranks_than_heads_share_a_copy(rank: Callable[..., Rank]) -> None:
    """Four ranks of a model with two heads: ranks 0 and 1 hold the same head."""
    assert HEADS == 2
    told = {"tp_size": 4}
    ranks = [rank(pool=gqa_pool(heads=1), told=told | {"tp_rank": r}) for r in (0, 1, 2)]
    source = ranks[0].fill(2)
    assert all(ranks[0].backend.batch_set_v1(keys(2), source))
    assert [r.backend.batch_exists(keys(2)) for r in ranks] == [2, 2, 0]
    target = ranks[1].empty(2)
    assert all(ranks[1].backend.batch_get_v1(keys(2), target))
    assert same(ranks[1].pages(target), ranks[0].pages(source))


@pytest.mark.parametrize("layout", GQA_LAYOUTS)
def test_interface_without_zero_copy(rank: Callable[..., Rank], layout: str) -> None:
    """The calls SGLang makes where interface_v1 is off; what they save the others load."""
    writer = rank(pool=gqa_pool(layout))
    source = writer.fill(3)
    assert writer.backend.batch_set(keys(3), writer.pages(source))
    places = [writer.pool.get_dummy_flat_data_page() for _ in range(4)]
    got = writer.backend.batch_get(keys(4), places)
    assert same(got[:3], writer.pages(source))
    assert got[3] is None
    assert writer.backend.exists(keys(3)[2])
    assert not writer.backend.exists(keys(4)[3])
    target = writer.empty(3)
    assert all(writer.backend.batch_get_v1(keys(3), target))
    assert same(writer.pages(target), writer.pages(source))
    place = writer.pool.get_dummy_flat_data_page()
    assert writer.backend.get(keys(4)[3], place) is None
    assert writer.backend.set(keys(4)[3], writer.pages(source)[0])
    assert same([writer.backend.get(keys(4)[3], place)], writer.pages(source)[:1])


def test_a_page_in_the_middle_is_missing(rank: Callable[..., Rank]) -> None:
    one = rank()
    source = one.fill(4)
    some = [0, 1, 3]
    for number in some:
        page = source[number * 64 : (number + 1) * 64]
        assert one.backend.batch_set_v1([keys(4)[number]], page) == [True]
    assert one.backend.batch_exists(keys(4)) == 2
    assert one.backend.batch_get_v1(keys(4), one.empty(4)) == [True, True, False, True]


def test_clear_forgets_and_stores_anew(rank: Callable[..., Rank]) -> None:
    one, other = rank(), rank()
    source = one.fill(2)
    assert all(one.backend.batch_set_v1(keys(2), source))
    for each in (one, other):  # SGLang clears on every rank
        each.backend.clear()
        assert each.backend.batch_exists(keys(2)) == 0
    assert all(one.backend.batch_set_v1(keys(2), source))
    assert other.backend.batch_exists(keys(2)) == 2


def test_closed_is_a_miss(rank: Callable[..., Rank]) -> None:
    one = rank()
    source = one.fill(2)
    assert all(one.backend.batch_set_v1(keys(2), source))
    one.backend.close()
    one.backend.close()
    assert one.backend.batch_exists(keys(2)) == 0
    assert one.backend.batch_get_v1(keys(2), source) == [False, False]
    assert one.backend.batch_set_v1(keys(2), source) == [False, False]
