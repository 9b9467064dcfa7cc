"""A store over the in-memory stage, with the medium and the stage in the test's hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ucm_core import _native
from ucm_core.store.contract import Geometry, Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.testing.blocks import EngineMemory, geometry_of

OPTIONS: dict[str, int] = {
    "timeout_ms": 20_000,
    "waiting_depth": 10_000,
    "running_depth": 64,
    "copiers": 1,
    "write_retries": 2,
    "retry_delay_ms": 1,
    "open_age_ms": 0,
}


@dataclass
class Rig:
    """A store and what is below it."""

    geometry: Geometry
    medium: _native.FakeMedium = field(default_factory=_native.FakeMedium)
    stage: Any = None
    store: Any = None

    def open(
        self,
        *,
        load_reserve: int = 8,
        shared: int = 24,
        cache_slots: int = 0,
        options: dict[str, int] | None = None,
        **fake: Any,
    ) -> NativeBlockStore:
        """``cache_slots``: over a host cache of so many objects instead of staging buffers."""
        geometry = native_geometry(self.geometry)
        self.stage = _native.FakeStage(geometry, self.medium, **fake)
        if cache_slots:
            tier = _native.cache_tier(
                geometry,
                name="rig",
                namespace_digest=bytes(32),
                shared=False,
                capacity_bytes=cache_slots * geometry.object_bytes,
                load_reserve=0,
                load_reserve_explicit=True,
            )
        else:
            tier = _native.staging_tier(geometry, load_reserve=load_reserve, shared=shared)
        native = _native.Store(self.stage, tier, **{**OPTIONS, **(options or {})})
        self.store = NativeBlockStore(native, self.geometry)
        return self.store

    def stored(self, numbers: range | list[int]) -> None:
        source = EngineMemory.whole(self.geometry, numbers).fill()
        task = self.store.dump(source.ids, source.shards, source.addresses)
        assert (task.wait_durable() == Status.OK).all()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """``make_rig(geometry=..., **options of Rig.open)`` -> an open :class:`Rig`; closed at the end."""
    rigs: list[Rig] = []

    def make(geometry: Geometry | None = None, **options: Any) -> Rig:
        rig = Rig(geometry or geometry_of())
        rig.open(**options)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.stage.release_hung(serve=True)
        rig.store.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()
