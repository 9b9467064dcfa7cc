"""The core's suite for storage stages, on slab files, and what operators meet of them."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from posix_store import NAMESPACE, PosixStore, geometry, ids_of, specs
from pydantic import ValidationError

from ucm_backend_posix.config import PosixConfig
from ucm_core import _native
from ucm_core.errors import ConfigError
from ucm_core.registry import StageContext
from ucm_core.store.contract import Geometry, Status
from ucm_core.store.native_store import native_geometry
from ucm_core.testing.stage_conformance import RawAccess, StageConformance

_PAGE = 4096
#: magic, version, number, slab, slot and shard bytes, shards, slots, slots of a group, layout bytes
_FILE_HEAD = struct.Struct("<8sIIQQQIIII")
_SLOT_HEAD = struct.Struct("<II16sQQQQQ")


class Slabs:
    """Raw access (``RawAccess``) to the slots of all slab files below a directory."""

    def __init__(self, root: Path, geometry: Geometry) -> None:
        self._root = root / NAMESPACE
        native = native_geometry(geometry)
        self._object_bytes, self._stride = native.object_bytes, native.shard_stride

    def _slots(self) -> Iterator[tuple[Path, bytes, int, int, int]]:
        """File, id, offset of the head, offset of the slot, bytes of the slot."""
        for path in sorted(self._root.glob("slab-*")):
            with path.open("rb") as file:
                fields = _FILE_HEAD.unpack(file.read(_FILE_HEAD.size))
                _, _, _, _, slot_bytes, _, _, slots, per_group, layout_bytes = fields
                if fields[0] != b"UCMSLAB\n":
                    continue
                heads = -(-(128 + layout_bytes) // _PAGE) * _PAGE
                data = heads + -(-slots // per_group) * _PAGE
                for i in range(slots):
                    at = heads + i // per_group * _PAGE + i % per_group * _SLOT_HEAD.size
                    file.seek(at)
                    head = _SLOT_HEAD.unpack(file.read(_SLOT_HEAD.size))
                    if head[0] == 0x544F4C53:
                        yield path, head[2], at, data + i * slot_bytes, slot_bytes

    def _find(self, id: bytes) -> tuple[Path, int, int, int]:
        for path, there, head, slot, size in self._slots():
            if there == id:
                return path, head, slot, size
        raise AssertionError(f"{id.hex()} is in no slot")

    @staticmethod
    def _swap_bytes(path: Path, at: int, data: bytes) -> bytes:
        with path.open("r+b") as file:
            file.seek(at)
            before = file.read(len(data))
            file.seek(at)
            file.write(data)
            os.fsync(file.fileno())
        return before

    def exists(self, id: bytes) -> bool:
        """What is removed leaves the index at once, and the medium a moment later."""
        end = time.monotonic() + 5
        while any(there == id for _, there, *_ in self._slots()):
            if time.monotonic() > end:
                return True
            time.sleep(0.005)
        return False

    def delete(self, id: bytes) -> None:
        path, head, slot, _ = self._find(id)
        self._swap_bytes(path, head, bytes(_SLOT_HEAD.size))
        self._swap_bytes(path, slot, bytes(_PAGE))

    def _data(self, slot: int, size: int) -> int:
        return slot + size - self._object_bytes

    def corrupt(self, id: bytes, shard: int) -> None:
        path, _, slot, size = self._find(id)
        at = self._data(slot, size) + shard * self._stride + 3
        byte = self._swap_bytes(path, at, b"\0")
        self._swap_bytes(path, at, bytes([byte[0] ^ 0x40]))

    def truncate(self, id: bytes) -> None:
        """A write that ended in the middle of the last shard."""
        path, _, slot, size = self._find(id)
        self._swap_bytes(path, slot + size - self._stride + 1, bytes(self._stride - 1))

    def swap(self, a: bytes, b: bytes) -> None:
        first, second = self._find(a), self._find(b)
        held = self._swap_bytes(second[0], second[2], bytes(second[3]))
        other = self._swap_bytes(first[0], first[2], held)
        self._swap_bytes(second[0], second[2], other)


class TestSlab(StageConformance):
    persistent = True
    detects_swap = True
    options: ClassVar[dict[str, object]] = {}

    def make_medium(self, tmp_path: Path) -> Path:
        return tmp_path

    def make_stage(self, medium: Path, geometry: Geometry) -> _native.Stage:
        config = PosixConfig(
            storage_backends=str(medium),
            posix_layout="slab",
            posix_capacity_gb="16 MiB",
            **self.options,
        )
        context = StageContext(geometry, NAMESPACE, b"\x07" * 32, "worker")
        stage: _native.Stage = specs()[0]["Posix"].build(context, config, None)
        return stage

    def raw(self, medium: Path, geometry: Geometry) -> RawAccess:
        return Slabs(medium, geometry)


class TestSlabThreads(TestSlab):
    options: ClassVar[dict[str, object]] = {"posix_io_engine": "psync", "io_direct": False}


_SLAB: dict[str, object] = {"posix_layout": "slab", "posix_capacity_gb": "8 MiB"}


@pytest.mark.parametrize("cache", [None, {"cache_buffer_capacity_gb": "8 MiB"}])
def test_pipelines_over_slab(tmp_path: Path, cache: dict[str, object] | None) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    with PosixStore(roots, options=dict(_SLAB), cache=cache) as store:
        assert store.dump(range(20)) == [Status.OK] * 20
        assert store.load(range(20)) == [Status.OK] * 20
    # Another start: memory is gone, the files tell what there is.
    with PosixStore(roots, options=dict(_SLAB), cache=cache) as store:
        assert store.present(range(21)) == [True] * 20 + [False]
        assert store.load(range(21)) == [Status.OK] * 20 + [Status.MISS]
        assert store.stat("slab_slots") >= 20


def test_heat_reaches_the_slots_below_a_cache(tmp_path: Path) -> None:
    cache = {"cache_buffer_capacity_gb": "8 MiB"}
    with PosixStore([tmp_path], options=dict(_SLAB), cache=cache) as store:
        assert store.dump(range(4)) == [Status.OK] * 4
        store.store.touch(ids_of(range(4)))
        assert store.stat("touches_total") == 4


def test_the_layout_needs_a_capacity() -> None:
    with pytest.raises(ValidationError, match="set posix_capacity_gb"):
        PosixConfig(storage_backends="/x", posix_layout="slab")


def test_an_engine_on_two_nodes_is_refused(tmp_path: Path) -> None:
    config = PosixConfig(storage_backends=str(tmp_path), **_SLAB)
    context = StageContext(geometry(), NAMESPACE, b"\x07" * 32, "worker", nodes=2)
    with pytest.raises(ConfigError, match="spans 2 nodes"):
        specs()[0]["Posix"].build(context, config, None)
    assert not any(tmp_path.iterdir())


def test_the_other_layout_is_refused_with_both_names(tmp_path: Path) -> None:
    with PosixStore([tmp_path]) as store:
        store.dump([1])
    with pytest.raises(ConfigError, match=r"holds the layout file.*posix_layout slab"):
        PosixStore([tmp_path], options=dict(_SLAB))
