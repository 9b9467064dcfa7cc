"""Store counters in an injected registry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ucm_core.coordinator import Coordinator
from ucm_core.identity import ModelIdentity
from ucm_core.observe import StoreCollector
from ucm_core.spec import GroupSpec, KeySpace, Kind, SnapshotKey, SpecTable

IDENTITY = ModelIdentity("id:test", "bf16")


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    assert len({name for name, _ in samples}) == len(samples), "a sample appears twice"
    return {name: float(value) for name, value in samples}


def test_counters_and_gauges_of_two_stores() -> None:
    registry = CollectorRegistry()
    collector = StoreCollector(registry)
    collector.add("a", lambda: {"posix.read_bytes_total": 7, "posix.queue_depth": 2})
    collector.add("b", lambda: {"posix.read_bytes_total": 1})
    samples = scrape(registry)
    assert samples['ucm_store_posix_read_bytes_total{store="a"}'] == 7
    assert samples['ucm_store_posix_read_bytes_total{store="b"}'] == 1
    assert samples['ucm_store_posix_queue_depth{store="a"}'] == 2
    assert samples["ucm_store_collect_errors_total"] == 0


def test_broken_store_is_counted_and_hides_nobody() -> None:
    def broken() -> Mapping[str, int]:
        raise RuntimeError("closed")

    registry = CollectorRegistry()
    collector = StoreCollector(registry)
    collector.add("bad", broken)
    collector.add("good", lambda: {"x.y_total": 1})
    samples = scrape(registry)
    assert samples['ucm_store_x_y_total{store="good"}'] == 1
    assert samples["ucm_store_collect_errors_total"] == 1


def test_second_collector_and_second_name_are_refused() -> None:
    registry = CollectorRegistry()
    collector = StoreCollector(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        StoreCollector(registry)
    collector.add("a", dict)
    with pytest.raises(ValueError, match="exported already"):
        collector.add("a", dict)
    collector.remove("a")
    collector.remove("a")
    collector.add("a", dict)


def test_a_coordinator_is_exported_under_the_documented_names() -> None:
    row = GroupSpec("s", Kind.SNAPSHOT, (0,), 64, 8)
    coordinator = Coordinator(KeySpace(SpecTable([row], grain=64, num_layers=1), IDENTITY))
    coordinator.stored(SnapshotKey("s", 128, b"\1" * 32))
    coordinator.missed(SnapshotKey("s", 64, b"\2" * 32))
    registry = CollectorRegistry()
    StoreCollector(registry).add("coordinator", coordinator.stats)
    samples = scrape(registry)
    ours = {n.removesuffix('{store="coordinator"}'): v for n, v in samples.items() if "{" in n}
    assert ours["ucm_store_checkpoint_directory_entries"] == 1
    assert ours["ucm_store_checkpoints_missed_total"] == 1
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in page for name in ours)
