"""The stores' own counters in vLLM's metrics: every name exists, sums are news only, health is logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import pytest

from ucm_core import _native
from ucm_core.registry import PipelineSpec, StageContext, StageSpec
from ucm_core.store import builtin
from ucm_core.store.config import StoreConfig
from ucm_core.store.contract import Status
from ucm_core.store.native_store import native_geometry
from ucm_core.store.pipeline import open_store
from ucm_core.testing.blocks import EngineMemory, geometry_of
from ucm_vllm.stats import UcmStats
from ucm_vllm.store_counters import STORE_COUNTERS, StoreWatch, counter_of


class Scripted:
    """A store of which only figures and health are asked."""

    def __init__(self) -> None:
        self.figures: dict[str, int] = {}
        self.troubles: dict[str, str] = {"Posix": ""}

    def stats(self) -> Mapping[str, int]:
        return dict(self.figures)

    def health(self) -> Mapping[str, str]:
        return dict(self.troubles)


def test_names_of_native_counters_become_metrics_with_their_stage() -> None:
    assert counter_of("Posix.read_bytes_total") == ("stage_bytes", "Posix read")
    assert counter_of("Fake.health_opened_total") == ("stage_outages", "Fake")
    assert counter_of("store.backend_dump_errors_total") == ("cache_backend_dump_wait_errors", "")
    assert counter_of("store.load_tasks_total") is None
    assert counter_of("Posix.read_queue") is None


def test_only_what_is_new_is_reported_in_the_units_of_the_metric() -> None:
    store: Any = Scripted()
    watch, stats = StoreWatch([store]), UcmStats(data={})
    store.figures = {"store.backend_dump_errors_total": 2, "Posix.read_us_total": 1_500_000}
    watch.look_now(stats.add)
    store.figures["store.backend_dump_errors_total"] = 5
    watch.look_now(stats.add)
    watch.look_now(stats.add)
    assert stats.data == {"cache_backend_dump_wait_errors": 5, "stage_seconds|Posix read": 1.5}


def test_it_looks_once_per_interval() -> None:
    store: Any = Scripted()
    store.figures = {"cache.evictions_total": 1}
    stats = UcmStats(data={})
    StoreWatch([store], interval_s=1000).look(stats.add)
    assert stats.data == {}
    StoreWatch([store], interval_s=0).look(stats.add)
    assert stats.data == {"cache_evictions": 1}


def test_health_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Scripted()
    watch, stats = StoreWatch([store]), UcmStats(data={})
    with caplog.at_level(logging.INFO, "ucm.vllm"):
        for text in ("", "out of service: 1 so far", "out of service: 2 so far", "", ""):
            store.troubles["Posix"] = text
            watch.look_now(stats.add)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["Posix: out of service: 1 so far", "Posix is healthy again"]


def test_a_real_store_has_the_counters_that_are_exported() -> None:
    """A counter renamed in C++ would vanish from the metrics without anybody noticing."""
    geometry = geometry_of()
    fake = _native.FakeStage(native_geometry(geometry), _native.FakeMedium())
    stages = {"Fake": StageSpec("Fake", "", builtin.EmptyConfig, lambda *_: fake)}
    health = {"interval_ms": 10, "timeout_ms": 5_000}
    with open_store(
        "Fake",
        stages=stages,
        pipelines={"Fake": PipelineSpec("Fake", ("Fake",), "")},
        stage_configs={},
        store_config=StoreConfig(staging_buffer_gb=4 << 20, dump_retries=1, store_health=health),  # type: ignore[arg-type]
        context=StageContext(geometry, "ns", b"\0" * 32, "worker"),
    ) as store:

        def dump(number: int) -> Status:
            source = EngineMemory.whole(geometry, [number]).fill()
            task = store.dump(source.ids, source.shards, source.addresses)
            return Status(int(task.wait_durable()[0]))

        assert dump(1) is Status.OK
        fake.set_fault(1, 5)
        assert dump(2) is not Status.OK
        while not store.stats()["Fake.health_open"]:
            time.sleep(0.005)
        assert dump(3) is Status.REJECTED
        stats = UcmStats(data={})
        StoreWatch([store]).look_now(stats.add)
    assert stats.data["cache_backend_dump_wait_errors"] == 2
    assert stats.data["stage_outages|Fake"] == 1
    assert stats.data["stage_refused_objects|Fake dump"] in (1, 2)
    # At least: probes of a stage without one of its own are objects too.
    assert stats.data["stage_bytes|Fake write"] >= geometry.shard_count * geometry.shard_bytes
    assert stats.data["store_copied_bytes|dump"] == 3 * geometry.shard_count * geometry.shard_bytes
    assert set(stats.data) <= {
        f"{name}|{kind}" if kind else name
        for name, kind in filter(None, map(counter_of, store.stats()))
    }


def test_every_metric_has_help_and_fitting_kinds() -> None:
    for name, (text, has_kind, keys) in STORE_COUNTERS.items():
        assert text.endswith("."), name
        for key, kind in keys.items():
            assert bool(kind) or not has_kind or key.startswith("*."), (name, key)
