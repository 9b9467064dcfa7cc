"""The stores' own counters in vLLM's metrics: every name exists, sums are news only, health is logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from real_stores import RealWorld
from ucm_core import _native
from ucm_core.identity import Manifest
from ucm_core.registry import PipelineSpec, StageContext, StageSpec
from ucm_core.store import builtin
from ucm_core.store.config import StoreConfig
from ucm_core.store.contract import Status
from ucm_core.store.native_store import native_geometry
from ucm_core.store.pipeline import open_store
from ucm_core.testing.blocks import EngineMemory, geometry_of
from ucm_vllm.stats import UcmStats
from ucm_vllm.store_counters import STORE_COUNTERS, STORE_GAUGES, StoreWatch, counter_of, gauge_of


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
    assert gauge_of("Posix.read_queue") == ("stage_queue", "Posix read")
    assert gauge_of("cache.slots_free") == ("cache_slots", "free")
    assert gauge_of("Posix.read_bytes_total") is None


def test_only_what_is_new_is_reported_in_the_units_of_the_metric() -> None:
    store: Any = Scripted()
    watch, stats = StoreWatch([store]), UcmStats(data={})
    store.figures = {"store.backend_dump_errors_total": 2, "Posix.read_us_total": 1_500_000}
    watch.look_now(stats)
    store.figures["store.backend_dump_errors_total"] = 5
    watch.look_now(stats)
    watch.look_now(stats)
    assert stats.data == {"cache_backend_dump_wait_errors": 5, "stage_seconds|Posix read": 1.5}


def test_gauges_show_the_highest_and_fall_again() -> None:
    """B41: what several stores or ranks see is not added up."""
    one: Any = Scripted()
    two: Any = Scripted()
    watch = StoreWatch([one, two])
    shown = []
    for first, second in ((3, 5), (1, 0)):
        stats = UcmStats(data={})
        one.figures, two.figures = {"Posix.read_queue": first}, {"Posix.read_queue": second}
        watch.look_now(stats)
        shown.append(dict(stats.data))
    assert shown == [{"stage_queue|Posix read": 5}, {"stage_queue|Posix read": 1}]


def test_it_looks_once_per_interval() -> None:
    store: Any = Scripted()
    store.figures = {"cache.evictions_total": 1}
    stats = UcmStats(data={})
    StoreWatch([store], interval_s=1000).look(stats)
    assert stats.data == {}
    StoreWatch([store], interval_s=0).look(stats)
    assert stats.data == {"cache_evictions": 1}


def test_health_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Scripted()
    watch, stats = StoreWatch([store]), UcmStats(data={})
    with caplog.at_level(logging.INFO, "ucm.vllm"):
        for text in ("", "out of service: 1 so far", "out of service: 2 so far", "", ""):
            store.troubles["Posix"] = text
            watch.look_now(stats)
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
        StoreWatch([store]).look_now(stats)
    assert stats.data["cache_backend_dump_wait_errors"] == 2
    assert stats.data["stage_outages|Fake"] == 1
    assert stats.data["stage_refused_objects|Fake dump"] in (1, 2)
    # At least: probes of a stage without one of its own are objects too.
    assert stats.data["stage_bytes|Fake write"] >= geometry.shard_count * geometry.shard_bytes
    assert stats.data["store_copied_bytes|dump"] == 3 * geometry.shard_count * geometry.shard_bytes
    assert stats.data["stage_out_of_service|Fake"] == 1
    assert stats.data["store_waiting_tasks|load"] == 0
    assert set(stats.data) <= {
        f"{name}|{kind}" if kind else name
        for key in store.stats()
        for name, kind in filter(None, (counter_of(key), gauge_of(key)))
    }


def test_the_host_cache_and_files_have_the_gauges_that_are_exported(tmp_path: Path) -> None:
    """Renamed in C++ they would vanish without anybody noticing."""
    sizes = {"cache_buffer_capacity_gb": 1 / 64, "store_health": {"enabled": True}}
    world = RealWorld(tmp_path, "Cache|Posix", **sizes)
    stats = UcmStats(data={})
    geometry = geometry_of()
    with world.opener("worker")(geometry, Manifest("n", 64, 1)) as store:
        source = EngineMemory.whole(geometry, [1]).fill()
        assert store.dump(source.ids, source.shards, source.addresses).wait_durable().tolist() == (
            [Status.OK] * geometry.shard_count
        )
        StoreWatch([store]).look_now(stats)
    shown = {key.partition("|")[0] for key in stats.data}
    assert set(STORE_GAUGES) <= shown
    assert stats.data["cache_slots|ready"] == 1
    assert stats.data["cache_capacity_bytes"] >= 1 << 24


def test_every_metric_has_help_and_fitting_kinds() -> None:
    for name, (text, has_kind, keys) in (STORE_COUNTERS | STORE_GAUGES).items():
        assert text.endswith("."), name
        for key, kind in keys.items():
            assert bool(kind) or not has_kind or key.startswith("*."), (name, key)
