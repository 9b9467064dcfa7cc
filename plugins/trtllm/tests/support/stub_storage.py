"""Storage of a test in memory, with faults: slow, hanging, failing, losing and damaging objects."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from ucm_core import _native
from ucm_core.store.contract import Geometry
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_trtllm.deployment import Deployment

HANG = 5  # ucm/fake_stage.h: Fault


@dataclass
class FakeStorage:
    """Objects survive engines, stages do not. ``timeout_ms``: of the stores."""

    timeout_ms: int = 2_000
    latency_us: int = 0
    fail_nth_read: int = 0
    fail_nth_write: int = 0
    media: dict[tuple[int, int], _native.FakeMedium] = field(default_factory=dict)
    stages: list[_native.FakeStage] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every deployment of this test opens its stores here."""
        monkeypatch.setattr(
            Deployment, "_open", lambda _, geometry, device: self.open(geometry, device)
        )

    def open(self, geometry: Geometry, device: Any) -> NativeBlockStore:
        native = native_geometry(geometry)
        key = (geometry.shard_count, geometry.shard_bytes)
        medium = self.media.setdefault(key, _native.FakeMedium())
        stage = _native.FakeStage(
            native,
            medium,
            latency_us=self.latency_us,
            lanes=2,
            fail_nth_read=self.fail_nth_read,
            fail_nth_write=self.fail_nth_write,
        )
        self.stages.append(stage)
        store = _native.Store(
            stage,
            _native.staging_tier(native, load_reserve=8, shared=24),
            timeout_ms=self.timeout_ms,
            waiting_depth=4096,
            running_depth=64,
            copiers=1,
            write_retries=1,
            retry_delay_ms=1,
            open_age_ms=0,
            device=device,
        )
        return NativeBlockStore(store, geometry)

    def damage(self, stream: random.Random, share: float) -> int:
        """Flip a byte of some objects, cut some short, lose some."""
        done = 0
        for medium in self.media.values():
            for key in medium.ids():
                if stream.random() < share:
                    how = stream.randrange(3)
                    if how == 0:
                        medium.corrupt(key, stream.randrange(64))
                    elif how == 1:
                        medium.truncate(key, 10)
                    else:
                        medium.remove(key)
                    done += 1
        return done

    def hang(self) -> None:
        for stage in self.stages:
            stage.set_fault(HANG)

    def recover(self) -> None:
        for stage in self.stages:
            stage.set_fault(0)
            stage.release_hung(serve=True)

    def __len__(self) -> int:
        return sum(len(medium) for medium in self.media.values())
