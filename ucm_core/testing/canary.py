"""The conformance suite on the in-memory stage, and on stages with one planted bug each.

The first must pass, every one of the others must fail: a suite that cannot fail proves nothing.
"""

from __future__ import annotations

from pathlib import Path

from ucm_core import _native
from ucm_core.store.contract import Geometry
from ucm_core.store.native_store import native_geometry
from ucm_core.testing.stage_conformance import RawAccess, StageConformance

#: Numbers of ``ucm::PlantedBug`` (native/include/ucm/canary_stage.h); 0 plants nothing.
PLANTED_BUGS = range(1, _native.PLANTED_BUGS)


class FakeRaw:
    """Raw access to a Fake medium (:class:`RawAccess`)."""

    def __init__(self, medium: _native.FakeMedium, geometry: Geometry) -> None:
        self._medium = medium
        self._stride = native_geometry(geometry).shard_stride
        self._object_bytes = native_geometry(geometry).object_bytes

    def exists(self, id: bytes) -> bool:
        return id in self._medium

    def delete(self, id: bytes) -> None:
        self._medium.remove(id)

    def corrupt(self, id: bytes, shard: int) -> None:
        assert self._medium.corrupt(id, shard * self._stride + 3)

    def truncate(self, id: bytes) -> None:
        assert self._medium.truncate(id, self._object_bytes - self._stride + 1)

    def swap(self, a: bytes, b: bytes) -> None:
        assert self._medium.swap(a, b)


class FakeConformance(StageConformance):
    """The suite for the stage `Fake`; ``bug`` puts a canary stage over it."""

    persistent = True
    detects_swap = True
    sees_foreign_deletes = True
    bug = 0

    def make_medium(self, tmp_path: Path) -> _native.FakeMedium:
        return _native.FakeMedium()

    def make_stage(self, medium: _native.FakeMedium, geometry: Geometry) -> _native.Stage:
        fake = _native.FakeStage(native_geometry(geometry), medium, lanes=2)
        return _native.canary_stage(fake, self.bug) if self.bug else fake

    def raw(self, medium: _native.FakeMedium, geometry: Geometry) -> RawAccess:
        return FakeRaw(medium, geometry)
