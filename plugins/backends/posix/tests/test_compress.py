"""`Compress` over files: the core's suite on what compresses and what does not, options, pipelines."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import test_conformance
from posix_store import NAMESPACE, PosixStore, content, object_path, specs
from pydantic import ValidationError

from ucm_backend_posix.compress import CompressConfig
from ucm_core import _native
from ucm_core.errors import ConfigError
from ucm_core.registry import StageContext
from ucm_core.store.contract import Geometry, Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.testing import blocks
from ucm_core.testing.stage_conformance import RawAccess

CONTEXT = (NAMESPACE, b"\x07" * 32, "worker")


class PackedFiles(test_conformance.Files):
    """Raw access to files whose shards may be packed: where each lies is in the header."""

    def _places(self, id: bytes) -> list[int] | None:
        """Where each shard begins; None when the file is as without compression."""
        header = self._path(id).read_bytes()[:4096]
        version, header_bytes = struct.unpack_from("<II", header, 8)
        if version == 1:
            return None
        (count,) = struct.unpack_from("<I", header, 32)
        packed = struct.unpack_from(f"<{count}Q", header, 128 + 8 * count)
        rooms = [self._stride if n == 0 else -(-n // 4096) * 4096 for n in packed]
        return [header_bytes + sum(rooms[:i]) for i in range(count)]

    def corrupt(self, id: bytes, shard: int) -> None:
        places = self._places(id)
        if places is None:
            return super().corrupt(id, shard)
        with self._path(id).open("r+b") as file:
            file.seek(places[shard] + 3)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x40]))

    def truncate(self, id: bytes) -> None:
        places = self._places(id)
        if places is None:
            return super().truncate(id)
        os.truncate(self._path(id), places[-1] + 1)


class TestCompressed(test_conformance.TestPosix):
    """Random bytes do not shrink: these objects are stored as without the stage."""

    def make_stage(self, medium: Path, geometry: Geometry) -> _native.Stage:
        below = super().make_stage(medium, geometry)
        context = StageContext(geometry, *CONTEXT)  # type: ignore[arg-type]
        stage: _native.Stage = specs()[0]["Compress"].build(context, CompressConfig(), below)
        return stage

    def raw(self, medium: Path, geometry: Geometry) -> RawAccess:
        return PackedFiles(medium, geometry)


class TestCompressedRepeats(TestCompressed):
    """Bytes that repeat: shards of 32 KiB become a page each."""

    @pytest.fixture
    def geometry(self) -> Geometry:
        return blocks.geometry_of(4, 16 << 10, 2)

    @pytest.fixture(autouse=True)
    def repeats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        random = blocks.EngineMemory.expected

        def expected(memory: blocks.EngineMemory, row: int) -> np.ndarray:  # type: ignore[type-arg]
            head = random(memory, row)[:64]
            return np.resize(head, memory.geometry.shard_bytes)

        monkeypatch.setattr(blocks.EngineMemory, "expected", expected)

    def test_it_saves_room(self, medium: Path, geometry: Geometry) -> None:
        store = self.open(medium, geometry)
        self.dump(store, [1])
        path = medium / NAMESPACE / blocks.block_id(1).hex()[:2] / blocks.block_id(1).hex()
        assert path.stat().st_size == 5 * 4096
        store.close()


def compressed(root: Path, cache: str | None = None, **options: object) -> PosixStore:
    """A store over compressed files of zeros and noise; ``cache``: the size of a host cache above."""
    return PosixStore(
        [root],
        Geometry(4, 16384, 1, blocks.RunShape(16384), "bf16|layer:4,token:32,elem:256"),
        cache=None if cache is None else {"cache_buffer_capacity_gb": cache},
        compress=options,
    )


def test_what_one_worker_compresses_another_loads_from_cache_and_files(tmp_path: Path) -> None:
    with compressed(tmp_path, "16 MiB") as store:
        assert store.dump(range(20)) == [Status.OK] * 20
        assert store.load(range(20)) == [Status.OK] * 20
        assert store.stat("compress_objects_total") == 20
        assert store.present(range(21)) == [True] * 20 + [False]
    with compressed(tmp_path) as store:
        assert store.load(range(21)) == [Status.OK] * 20 + [Status.MISS]


def test_plain_files_of_the_same_namespace_are_read(tmp_path: Path) -> None:
    shape = Geometry(4, 16384, 1, blocks.RunShape(16384), "bf16|layer:4,token:32,elem:256")
    with PosixStore([tmp_path], shape) as plain:
        plain.dump(range(3))
    with compressed(tmp_path) as store:
        assert store.present(range(3)) == [True] * 3
        assert store.load(range(3)) == [Status.OK] * 3


def test_a_lossy_codec_is_refused_and_says_why() -> None:
    with pytest.raises(ValidationError, match="'fp8' is not offered: only the lossless codecs"):
        CompressConfig(compress_codec="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="0 is not a level"):
        CompressConfig(compress_level=0)


def test_a_stage_that_keeps_no_shorter_blocks_is_refused() -> None:
    geometry = blocks.geometry_of()
    below = _native.empty_stage(_native.Geometry(4, 1280, 1, [(1280, 1, 0)], "x"))
    context = StageContext(geometry, *CONTEXT)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'Empty'.* does not keep objects"):
        specs()[0]["Compress"].build(context, CompressConfig(), below)


def test_slots_of_one_size_gain_nothing_and_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'Posix'.* does not keep objects.*layout 'file'"):
        PosixStore(
            [tmp_path],
            options={"posix_layout": "slab", "posix_capacity_gb": "8 MiB"},
            compress={},
        )


def test_files_are_smaller_where_the_content_is(tmp_path: Path) -> None:
    sizes = {}
    for codec in ("zstd", "none"):
        with compressed(tmp_path / codec, compress_codec=codec) as store:
            memory = np.zeros((4, 16384), np.uint8)
            memory[0] = content(store.shape, 1)[0]
            assert store.dump_bytes(1, memory) == Status.OK
            statuses, loaded = store.load_bytes([1])
            assert statuses == [Status.OK] and np.array_equal(loaded[0], memory)
        sizes[codec] = object_path(tmp_path / codec, 1).stat().st_size
    assert sizes == {"zstd": 4096 + 16384 + 3 * 4096, "none": 4096 + 4 * 16384}


def test_stuck_io_keeps_its_buffers_and_is_counted() -> None:
    """A medium that hangs, below compression and the host cache: results within the bound, nothing reused."""
    geometry = blocks.geometry_of()
    native = native_geometry(geometry)
    fake = _native.FakeStage(native, _native.FakeMedium())
    tier = _native.cache_tier(
        native,
        name="stuck",
        namespace_digest=bytes(32),
        shared=False,
        capacity_bytes=4 * native.object_bytes,
        load_reserve=0,
        load_reserve_explicit=True,
    )
    store = NativeBlockStore(
        _native.Store(
            _native.compress_stage(fake, codec="zstd"),
            tier,
            timeout_ms=400,
            waiting_depth=100,
            running_depth=16,
            copiers=1,
            write_retries=0,
            retry_delay_ms=1,
            open_age_ms=0,
        ),
        geometry,
    )
    fake.set_fault(5)  # hang
    source = blocks.EngineMemory.whole(geometry, [1]).fill()
    target = blocks.EngineMemory.whole(geometry, [2])
    dump = store.dump(source.ids, source.shards, source.addresses)
    load = store.load(target.ids, target.shards, target.addresses)
    assert (load.wait() == Status.TIMEOUT).all()
    assert not (dump.wait_durable() == Status.OK).any()
    stats = store.stats()
    assert stats["store.buffers_quarantined"] == 2 and stats["cache.slots_pinned"] == 2
    assert stats["Fake.compress_buffers_in_use"] == 1
    began = time.monotonic()
    store.close(timeout_s=0.3)
    assert time.monotonic() - began < 5
    stats = store.stats()
    assert stats["store.abandoned_io_total"] == 2 and stats["cache.slots_pinned"] == 2
    assert fake.release_hung(serve=True) == 2  # the memory is still there
    assert all(target.untouched(row) for row in range(4))
