"""The core's suite for storage stages, on files. Raw access opens, cuts and renames the files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from posix_store import NAMESPACE, specs

from ucm_backend_posix.config import PosixConfig
from ucm_core import _native
from ucm_core.registry import StageContext
from ucm_core.store.contract import Geometry
from ucm_core.store.native_store import native_geometry
from ucm_core.testing.stage_conformance import RawAccess, StageConformance


class Files:
    """Raw access (``RawAccess``): data regions stand at the end of a file, in order of shards."""

    def __init__(self, root: Path, geometry: Geometry) -> None:
        self._root = root
        self._object_bytes = native_geometry(geometry).object_bytes
        self._stride = native_geometry(geometry).shard_stride

    def _path(self, id: bytes) -> Path:
        return self._root / NAMESPACE / id.hex()[:2] / id.hex()

    def exists(self, id: bytes) -> bool:
        return self._path(id).exists()

    def delete(self, id: bytes) -> None:
        self._path(id).unlink()

    def corrupt(self, id: bytes, shard: int) -> None:
        path = self._path(id)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - self._object_bytes + shard * self._stride + 3)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x40]))

    def truncate(self, id: bytes) -> None:
        path = self._path(id)
        os.truncate(path, path.stat().st_size - self._stride + 1)

    def swap(self, a: bytes, b: bytes) -> None:
        between = self._root / "between"
        self._path(a).rename(between)
        self._path(b).rename(self._path(a))
        between.rename(self._path(b))


class TestPosix(StageConformance):
    persistent = True
    detects_swap = True
    sees_foreign_deletes = True
    options: ClassVar[dict[str, object]] = {}

    def make_medium(self, tmp_path: Path) -> Path:
        return tmp_path

    def make_stage(self, medium: Path, geometry: Geometry) -> _native.Stage:
        config = PosixConfig(storage_backends=str(medium), **self.options)
        context = StageContext(geometry, NAMESPACE, b"\x07" * 32, "worker")
        stage: _native.Stage = specs()[0]["Posix"].build(context, config, None)
        return stage

    def raw(self, medium: Path, geometry: Geometry) -> RawAccess:
        return Files(medium, geometry)


class TestPosixThreads(TestPosix):
    options: ClassVar[dict[str, object]] = {"posix_io_engine": "psync", "io_direct": False}
