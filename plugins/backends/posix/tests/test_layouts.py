"""Objects in another layout: converted on the way into the store's buffers, never on the way out.

The engine memory of a load is checked whole: bytes that were not verified must not reach it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from posix_store import PosixStore, content, ids_of, object_path

from ucm_core.adapter.convert import Conversion
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.store.contract import Geometry, RunShape, Status

#: 4 layers, 64 tokens, 2 heads of 16: pages of 32 and of 64 tokens with K transposed, SGLang's pages,
#: plain rows, and heads before tokens.
PAGES_32 = "fp32|layer:4,token:2@32,head:2,kv(elem:16,token:32;token:32,elem:16)"
PAGES_64 = "fp32|layer:4,head:2,kv(elem:16,token:64;token:64,elem:16)"
PAGE_FIRST = "fp32|kv:2,token:64,layer:4,head:2,elem:16"
PAGE_FIRST_DIRECT = "fp32|kv:2,layer:4,token:64,head:2,elem:16"
HND = "fp32|layer:4,kv:2,head:2,token:64,elem:16"
ALL = [PAGES_32, PAGES_64, PAGE_FIRST, PAGE_FIRST_DIRECT, HND]


def shape_of(text: str) -> Geometry:
    layout = LayoutDescriptor.parse(text)
    size = layout.shard_bytes
    return Geometry(layout.shard_count, size, 1, RunShape(size), str(layout))


def store(root: Path, layout: str, **options: Any) -> PosixStore:
    return PosixStore([root], shape=shape_of(layout), **options)


def as_seen_by(reader: str, writer: str, number: int) -> npt.NDArray[np.uint8]:
    """What ``content`` of the writer's object is in the reader's order."""
    conversion = Conversion(LayoutDescriptor.parse(writer), LayoutDescriptor.parse(reader))
    got = np.zeros(conversion.target_bytes, np.uint8)
    conversion.run(content(shape_of(writer), number).reshape(-1), got)
    return got.reshape(shape_of(reader).shard_count, -1)


@pytest.mark.parametrize("writer", ALL)
def test_every_reader_gets_its_own_order(writer: str, tmp_path: Path) -> None:
    numbers = range(6)
    with store(tmp_path, writer) as a:
        assert a.dump(numbers) == [Status.OK] * 6
    for reader in ALL:
        with store(tmp_path, reader) as b:
            assert b.present(numbers) == [True] * 6
            statuses, memory = b.load_bytes(numbers)
            assert statuses == [Status.OK] * 6
            for n in numbers:
                assert np.array_equal(memory[n], as_seen_by(reader, writer, n)), (reader, n)
                # The control: the stored bytes unconverted would be wrong.
                flat = content(shape_of(writer), n).reshape(-1)
                assert np.array_equal(memory[n].reshape(-1), flat) == (reader == writer)
            assert b.stat("read_converted_total") == (0 if reader == writer else 6)
            assert b.dump([0]) == [Status.OK]
            assert b.stat("write_existing_total") == 1, "the object is there, in another order"


def test_two_readers_of_different_layouts_share_a_segment(tmp_path: Path) -> None:
    """Each finds its own order in the host cache; each object is converted once, when it is filled."""
    cache = {"cache_buffer_capacity_gb": "64 MiB", "share_buffer_enable": True}
    numbers = range(8)
    with store(tmp_path, PAGE_FIRST) as writer:
        writer.dump(numbers)
    with (
        store(tmp_path, PAGES_32, cache=cache) as a,
        store(tmp_path, PAGES_64, cache=cache) as b,
        store(tmp_path, PAGES_64, cache=cache) as c,
    ):
        for _ in range(2):
            for reader, layout in ((a, PAGES_32), (b, PAGES_64), (c, PAGES_64)):
                statuses, memory = reader.load_bytes(numbers)
                assert statuses == [Status.OK] * 8
                for n in numbers:
                    assert np.array_equal(memory[n], as_seen_by(layout, PAGE_FIRST, n))
        assert a.stat("read_converted_total") == 8
        assert b.stat("read_converted_total") + c.stat("read_converted_total") == 8


def test_the_cache_takes_dumps_of_one_id_in_two_layouts(tmp_path: Path) -> None:
    cache = {"cache_buffer_capacity_gb": "64 MiB", "share_buffer_enable": True}
    with store(tmp_path, PAGES_32, cache=cache) as a, store(tmp_path, PAGES_64, cache=cache) as b:
        assert a.dump([1]) == [Status.OK]
        statuses, memory = b.load_bytes([1])
        assert statuses == [Status.OK]
        assert np.array_equal(memory[0], as_seen_by(PAGES_64, PAGES_32, 1))
        assert a.load([1]) == [Status.OK]


@pytest.mark.parametrize("at", [130, 4096 + 1, 4096 + 40_000, 4096 + 65_535])
@pytest.mark.parametrize("cached", [False, True])
def test_damaged_bytes_are_never_converted_into_the_engine(
    at: int, cached: bool, tmp_path: Path
) -> None:
    with store(tmp_path, PAGE_FIRST) as writer:
        writer.dump([1, 2])
    path = object_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    cache = {"cache_buffer_capacity_gb": "64 MiB"} if cached else None
    with store(tmp_path, PAGES_32, cache=cache) as reader:
        statuses, memory = reader.load_bytes([1, 2])
        assert statuses == [Status.CORRUPT, Status.OK]
        assert not memory[0].any(), "no byte of a damaged object reaches the engine"
        assert np.array_equal(memory[1], as_seen_by(PAGES_32, PAGE_FIRST, 2))
        assert not path.exists()
        assert reader.dump([1]) == [Status.OK]
        assert reader.load([1]) == [Status.OK]


@pytest.mark.parametrize(
    "other",
    [
        "bf16|layer:4,head:2,kv:2,token:64,elem:32",
        "fp32|layer:4,head:4,kv:2,token:64,elem:8",
        "fp32|layer:4,head:2,kv:2,token:32,elem:32",
        "fp32|layer:2,head:2,kv:2,token:64,elem:32",
        "opaque.kernel-x|layer:4,elem:16384",
    ],
)
def test_other_elements_in_as_many_bytes_are_a_miss_that_stays(other: str, tmp_path: Path) -> None:
    with store(tmp_path, other) as writer:
        writer.dump([1])
        with store(tmp_path, PAGES_64) as reader:
            statuses, memory = reader.load_bytes([1])
            assert statuses == [Status.MISS]
            assert not memory.any()
            assert reader.stat("read_foreign_total") == 1
        assert writer.load([1]) == [Status.OK]


def test_single_shards_of_a_page_first_object(tmp_path: Path) -> None:
    """A layer-wise reader asks shard by shard; the object is read and converted once."""
    with store(tmp_path, PAGE_FIRST) as writer:
        writer.dump([3])
    want = as_seen_by(PAGES_64, PAGE_FIRST, 3)
    with store(tmp_path, PAGES_64) as reader:
        for shard in (2, 0, 3, 1):
            memory = np.zeros(reader.shape.shard_bytes, np.uint8)
            task = reader.store.load(
                ids_of([3]),
                np.array([shard], dtype=np.uint32),
                np.array([[memory.ctypes.data]], dtype=np.uint64),
            )
            assert list(task.wait()) == [Status.OK]
            assert np.array_equal(memory, want[shard])
        assert reader.stat("convert_reads_total") == 1
