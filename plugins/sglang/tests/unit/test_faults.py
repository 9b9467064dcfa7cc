"""Damaged, missing and unreachable pages: exact results per page, never wrong bytes, never an exception."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine_harness.tamper import DAMAGES, objects
from host_pools import PAGE, Rank, keys, same, serve
from ucm_core.errors import FullError


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(**options: object) -> Rank:
        made.append(Rank(tmp_path / "kv", options=options))
        return made[-1]

    serve()
    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", [k for k in DAMAGES if k != "swap_with_next"])
def test_one_damaged_page(rank: Callable[..., Rank], kind: str) -> None:
    """B54: the others are right, the damaged one is told."""
    writer = rank()
    source = writer.fill(4)
    for number in range(4):
        before = set(objects(writer.root))
        page = source[number * PAGE : (number + 1) * PAGE]
        assert writer.backend.batch_set_v1([keys(4)[number]], page) == [True]
        if number == 2:
            (path,) = set(objects(writer.root)) - before
    DAMAGES[kind](path)
    reader = rank()
    target = reader.empty(4)
    assert reader.backend.batch_get_v1(keys(4), target) == [True, True, False, True]
    got, wanted = reader.pages(target), writer.pages(source)
    assert same([got[i] for i in (0, 1, 3)], [wanted[i] for i in (0, 1, 3)])
    counters = reader.backend.counters()
    assert counters["load_pages"] == 3
    assert sum(v for k, v in counters.items() if k.startswith("load_failed_pages")) == 1
    assert counters["load_bytes"] == 3 * writer.pages(source)[0].numel() * 4


def test_swapped_files(rank: Callable[..., Rank]) -> None:
    one = rank()
    source = one.fill(2)
    assert all(one.backend.batch_set_v1(keys(2), source))
    first, second = objects(one.root)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert rank().backend.batch_get_v1(keys(2), one.empty(2)) == [False, False]


def test_a_hung_file(rank: Callable[..., Rank]) -> None:
    """B23: one page costs the timeout, its neighbours are loaded, later calls go on."""
    writer = rank()
    source = writer.fill(4)
    assert all(writer.backend.batch_set_v1(keys(4), source))
    victim = objects(writer.root)[1]
    victim.unlink()
    os.mkfifo(victim)
    reader = rank(timeout_ms=700, store_health={"enabled": False})
    target = reader.empty(4)
    start = time.monotonic()
    results = reader.backend.batch_get_v1(keys(4), target)
    assert time.monotonic() - start < 5.0
    assert results.count(False) == 1
    good = [i for i, ok in enumerate(results) if ok]
    got, wanted = reader.pages(target), writer.pages(source)
    assert same([got[i] for i in good], [wanted[i] for i in good])
    assert reader.backend.batch_get_v1([keys(4)[good[0]]], target[:PAGE]) == [True]


def test_orphans_are_no_hits(rank: Callable[..., Rank]) -> None:
    """B30: a temporary of a writer that died counts as nothing."""
    one = rank()
    source = one.fill(1)
    assert all(one.backend.batch_set_v1(keys(1), source))
    (path,) = objects(one.root)
    path.rename(path.with_name(f".tmp-{path.name}-dead"))
    assert rank().backend.batch_exists(keys(1)) == 0
    assert rank().backend.batch_get_v1(keys(1), one.empty(1)) == [False]


def test_a_store_that_raises_costs_a_recompute(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rank()
    source = one.fill(2)
    lane = one.backend._deployment.lanes["kv"]

    def raises(*_: object) -> object:
        raise FullError("no room")

    for name in ("leading", "present", "load", "save"):
        monkeypatch.setattr(type(lane), name, raises)
    assert one.backend.batch_exists(keys(2)) == 0
    assert one.backend.batch_exists_v2(keys(2), []).kv_hit_pages == 0
    assert one.backend.batch_get_v1(keys(2), source) == [False, False]
    assert one.backend.batch_set_v1(keys(2), source) == [False, False]
    assert one.backend.batch_set(keys(2), one.pages(source)) is False
    assert one.backend.batch_get(keys(2), one.pages(source)) == [None, None]
    counters = one.backend.counters()
    assert counters["call_failures|batch_get_v1"] == 1
    assert counters["lookup_failures|FullError"] == 2


@pytest.mark.parametrize(
    ("names", "indices"),
    [
        (["zz" * 32], PAGE),  # no key
        (["ab"], PAGE),
        (["a" * 64] * 2, PAGE),  # two keys for one page
        (["a" * 64], PAGE - 1),  # no whole page
    ],
)
def test_calls_that_make_no_sense(
    rank: Callable[..., Rank], names: list[str], indices: int
) -> None:
    one = rank()
    where = one.fill(1)[:indices]
    assert one.backend.batch_set_v1(names, where) == [False] * len(names)
    assert one.backend.batch_get_v1(names, where) == [False] * len(names)
    assert one.backend.batch_get_v1([], torch.empty(0, dtype=torch.int64)) == []
    assert not objects(one.root)


def test_no_temporaries_stay_behind(rank: Callable[..., Rank]) -> None:
    one = rank()
    for _ in range(3):
        assert all(one.backend.batch_set_v1(keys(2), one.fill(2)))
    one.backend.close()
    assert len(objects(one.root)) == 2
    assert not list(one.root.rglob(".tmp-*"))
