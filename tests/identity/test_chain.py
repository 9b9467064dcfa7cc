"""Content chain: incremental, exact about its input, separated by root and extras."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core import _native
from ucm_core.identity import ChainExtra, ContentChain, chain_root

IMAGE = bytes(range(32))
SEED = bytes(range(32, 64))


def links(tokens: list[int], block: int = 16, root: bytes = b"", extras: Any = ()) -> list[bytes]:
    chain = ContentChain(block, root, extras)
    chain.extend(np.array(tokens, np.uint64))
    return [row.tobytes() for row in chain.links]


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1) | st.integers(2**32, 2**64 - 1), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    block=st.integers(1, 20),
    extras=st.lists(st.integers(0, 90), max_size=4),
)
def test_any_split_gives_the_same_links(
    tokens: list[int], cuts: list[int], block: int, extras: list[int]
) -> None:
    items = [ChainExtra(p, 1, "image", IMAGE) for p in extras]
    whole = ContentChain(block, extras=items)
    whole.extend(np.array(tokens, np.uint64))
    parts = ContentChain(block, extras=items)
    edges = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    for begin, end in itertools.pairwise(edges):
        piece = tokens[begin:end]
        dtype = np.uint32 if all(t < 2**32 for t in piece) else np.uint64
        parts.extend(np.array(piece, dtype))
    assert np.array_equal(whole.links, parts.links)
    assert whole.tail_link() == parts.tail_link()
    assert whole.tokens == parts.tokens == len(tokens)


def test_b46_only_the_new_block_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One native call per batch; appending a token hashes at most one block."""
    calls: list[int] = []
    real = _native.hash.extend_chain_u32

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(_native_hash, name)

        def extend_chain_u32(self, *args: Any) -> None:
            calls.append(len(args[-1]))
            real(*args)

    _native_hash = _native.hash
    monkeypatch.setattr(_native, "hash", Spy())
    chain = ContentChain(128)
    chain.extend(np.zeros(128 * 1024 - 1, np.uint32))
    assert calls == [1023]
    chain.extend(np.zeros(1, np.uint32))
    assert calls == [1023, 1]
    chain.extend(np.zeros(1, np.uint32))
    assert calls == [1023, 1]
    assert len(chain) == 1024


def test_b04_salts_and_adapters_are_apart() -> None:
    tokens = list(range(64))
    roots = [
        chain_root(),
        chain_root(cache_salt=""),
        chain_root(cache_salt="x"),
        chain_root(cache_salt="y"),
        chain_root(lora_key="x"),
        chain_root(lora_key=""),
        chain_root(lora_key="x", cache_salt="x"),
    ]
    seen = [link for root in roots for link in links(tokens, root=root)]
    assert len(set(seen)) == len(seen) == 4 * len(roots)
    assert links(tokens, root=chain_root("a", "b")) == links(tokens, root=chain_root("a", "b"))


def test_b02_adapters_by_content_not_order() -> None:
    first = links(list(range(64)), root=chain_root(lora_key="lora:" + "1" * 64))
    other = links(list(range(64)), root=chain_root(lora_key="lora:" + "2" * 64))
    assert not set(first) & set(other)


def test_b03_images() -> None:
    """Five blocks, image on tokens 20..50: block 0 is shared, the rest differs by image and place."""
    tokens = list(range(80))
    near = IMAGE[:1] + b"\xff" + IMAGE[2:]  # differs in one byte only, its end is the same
    plain = links(tokens)
    base = links(tokens, extras=[ChainExtra(20, 31, "image", IMAGE)])
    for other in (
        plain,
        links(tokens, extras=[ChainExtra(20, 31, "image", near)]),
        links(tokens, extras=[ChainExtra(21, 31, "image", IMAGE)]),
        links(tokens, extras=[ChainExtra(20, 30, "image", IMAGE)]),
        links(tokens, extras=[ChainExtra(20, 31, "video", IMAGE)]),
        links(tokens, extras=[ChainExtra(20, 31, "image", IMAGE)] * 2),
    ):
        assert other[0] == base[0]
        assert not set(other[1:]) & set(base[1:])


def test_b03_a_truncated_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        ChainExtra(20, 31, "image", IMAGE[:2])


def test_extra_after_its_link_is_refused() -> None:
    chain = ContentChain(16)
    chain.extend(np.zeros(20, np.uint32))
    chain.add_extra(ChainExtra(16, 1, "image", IMAGE))
    with pytest.raises(ValueError, match="are hashed"):
        chain.add_extra(ChainExtra(15, 1, "image", IMAGE))


def test_extra_in_the_tail_counts_in_tail_and_link() -> None:
    chain = ContentChain(16)
    chain.extend(np.zeros(20, np.uint32))
    plain = chain.tail_link()
    chain.add_extra(ChainExtra(19, 1, "image", IMAGE))
    assert chain.tail_link() != plain
    without = ContentChain(16)
    without.extend(np.zeros(20, np.uint32))
    assert chain.tail_link(3) == without.tail_link(3)  # the item starts after these
    chain.extend(np.zeros(12, np.uint32))
    without.extend(np.zeros(12, np.uint32))
    assert chain.links[0].tobytes() == without.links[0].tobytes()
    assert chain.last != without.last


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(32, np.int32),
        np.zeros(32, np.float32),
        np.zeros(64, np.uint32)[::2],
        np.zeros((2, 16), np.uint32),
        np.zeros(32, ">u4"),
        [1, 2, 3],
        None,
    ],
    ids=["int32", "float32", "strided", "2-d", "big endian", "list", "None"],
)
def test_wrong_input_is_an_error_never_a_copy(bad: Any) -> None:
    with pytest.raises(TypeError):
        ContentChain(16).extend(bad)


def test_negative_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        ContentChain(16).extend(np.array([5, -1], np.int64))


def test_native_border_checks_its_input() -> None:
    none, rows = np.empty(0, np.uint64), np.empty((0, 32), np.uint8)
    out = np.empty((2, 32), np.uint8)
    with pytest.raises(ValueError, match="whole blocks"):
        _native.hash.extend_chain_u32(b"", none, np.zeros(31, np.uint32), 16, none, rows, out)
    with pytest.raises(ValueError, match="previous"):
        _native.hash.extend_chain_u32(b"x", none, np.zeros(32, np.uint32), 16, none, rows, out)
    with pytest.raises(TypeError):
        _native.hash.extend_chain_u32(
            b"",
            none,
            np.zeros(32, np.int32),
            16,
            none,
            rows,
            out,  # type: ignore[arg-type]
        )
    with pytest.raises(ValueError, match="seed"):
        _native.hash.object_ids(b"short", out, np.empty((2, 16), np.uint8))
    with pytest.raises(ValueError, match="length"):
        _native.hash.object_ids(SEED, out, np.empty((3, 16), np.uint8))


def test_object_ids_of_coarser_blocks_and_parts() -> None:
    chain = ContentChain(16)
    chain.extend(np.arange(16 * 7, dtype=np.uint32))
    fine = chain.object_ids(SEED)
    assert np.array_equal(chain.object_ids(SEED, 2, 5), fine[2:5])
    assert np.array_equal(chain.object_ids(SEED, links_per_block=2), fine[1::2])
    assert np.array_equal(chain.object_ids(SEED, 1, links_per_block=3), fine[5::3])
    assert chain.object_ids(SEED, 7).shape == (0, 16)
    with pytest.raises(IndexError):
        chain.object_ids(SEED, 0, 8)


def test_snapshot_positions() -> None:
    chain = ContentChain(16)
    chain.extend(np.arange(40, dtype=np.uint32))
    ids = chain.snapshot_ids(SEED, [16, 32, 37])
    assert len({row.tobytes() for row in ids}) == 3
    assert not np.array_equal(ids[0], chain.object_ids(SEED)[0])
    for bad in (0, 15, 41, 48):
        with pytest.raises(IndexError):
            chain.snapshot_ids(SEED, [bad])
    # the position's tokens decide, not what follows
    shorter = ContentChain(16)
    shorter.extend(np.arange(37, dtype=np.uint32))
    assert np.array_equal(shorter.snapshot_ids(SEED, [37])[0], ids[2])
    assert ContentChain(16).snapshot_ids(SEED, []).shape == (0, 16)


def test_links_view_is_read_only_and_stable() -> None:
    chain = ContentChain(4)
    chain.extend(np.arange(8, dtype=np.uint32))
    view, copy = chain.links, chain.links.copy()
    chain.extend(np.arange(4000, dtype=np.uint32))
    assert np.array_equal(view, copy)
    with pytest.raises(ValueError):
        view[0, 0] = 1
