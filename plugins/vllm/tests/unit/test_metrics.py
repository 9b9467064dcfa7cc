"""What our counters mean: once per admission, nothing diluted or doubled, only what arrived is a hit."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scripted_engine import ScriptedEngine, World, prompt
from ucm_core.store.contract import Status
from ucm_vllm import lookup
from ucm_vllm.stats import EXPORTED, GAUGES, UcmPromMetrics, UcmStats


def _id(engine: ScriptedEngine, tokens: list[int], block: int) -> bytes:
    seed = engine.connector._deployment.placement.all()[0].seed
    return bytes(engine.chain_of(tokens).object_ids(seed)[block])


def test_local_tokens_and_polls_do_not_dilute_the_rate(
    engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B41: 1000 tokens, 576 of them local, 192 in the store, the answer "later" several times."""
    tokens = prompt(1, 1000)
    engine().generate("seed", tokens[:769], max_tokens=1)
    e = engine()
    e.generate("local", tokens[:577], max_tokens=1)
    before = dict(e.counted)
    monkeypatch.setattr(lookup, "INLINE_WAIT_S", 0.0)
    e.connector.deployment_store().lookup_delay_s = 0.05
    polls = 0
    match = e.connector.get_num_new_matched_tokens

    def polled(*args: Any) -> Any:
        nonlocal polls
        polls += 1
        return match(*args)

    monkeypatch.setattr(e.connector, "get_num_new_matched_tokens", polled)
    e.generate("a", tokens, max_tokens=2)
    assert polls > 2, "it was never told to wait"
    counted = {k: v - before.get(k, 0) for k, v in e.counted.items()}
    assert counted["requests"] == 1
    assert counted["query_tokens"] == 1000 - 576
    assert counted["hit_tokens"] == 192


def test_a_partial_load_is_a_partial_hit(engine, world: World) -> None:
    """B54: four blocks [ok, cut to nothing, missing, ok]: one is used, the rest is computed anew."""
    tokens = prompt(2, 4 * 64 + 5)
    wanted = engine().generate("seed", tokens)
    e = engine()
    world.faults[_id(e, tokens, 1)] = Status.CORRUPT
    world.faults[_id(e, tokens, 2)] = Status.MISS
    assert e.generate("a", tokens) == wanted
    assert e.counted["hit_tokens"] == 64
    assert e.counted["load_blocks"] == 2
    assert e.counted["load_failed_blocks|corrupt"] == 1
    assert e.counted["load_failed_blocks|miss"] == 1
    reported = [r.invalid_block_ids for r in e.reports if r.invalid_block_ids]
    assert [len(pages) for pages in reported] == [4], "two stored blocks of two pages each"


def test_a_preempted_request_asks_again_and_is_one_request(engine, world: World) -> None:
    e = engine()
    e.add("a", prompt(3, 200), max_tokens=30)
    e.step()
    e.step()
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    e.run()
    assert e.counted["requests"] == 1
    assert e.counted["hit_tokens"] == 192
    assert e.counted["hit_tokens"] <= e.counted["query_tokens"]


def test_a_reset_between_promise_and_blocks_loads_nothing_stale(engine, world: World) -> None:
    """0.33 may order a load some steps after it was promised; weights may change meanwhile."""
    tokens = prompt(4, 200)
    wanted = engine().generate("seed", tokens)
    e = engine(runner="0.33", depth=2, lagging=True)
    e.add("busy", prompt(5, 40), max_tokens=20)
    e.step()
    e.add("a", tokens)
    e.step()
    assert "a" in e.runner._put_off
    assert e.scheduler.reset_connector_cache()
    e.run()
    assert e.outputs["a"] == wanted
    assert e.counted["load_failed_blocks|miss"] == 3
    assert "hit_tokens" not in e.counted
    assert e.pending() == {}


def test_a_hit_that_vllm_takes_only_in_part(engine, world: World, monkeypatch) -> None:
    """0.33 may cut what it was offered: exactly that much is loaded, and counted."""
    tokens = prompt(6, 300)
    wanted = engine().generate("seed", tokens)
    e = engine()
    match = e.connector.get_num_new_matched_tokens

    def cut(request: Any, local: int) -> tuple[int | None, bool]:
        offered, later = match(request, local)
        return (None if offered is None else min(offered, 96)), later

    monkeypatch.setattr(e.connector, "get_num_new_matched_tokens", cut)
    assert e.generate("a", tokens) == wanted
    assert e.counted["hit_tokens"] == 96
    assert e.counted["load_blocks"] == 2
    assert e.pending() == {}


def _exported(per_engine: dict[int, list[object]]) -> tuple[UcmPromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    kinds: Any = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    config: Any = SimpleNamespace(kv_transfer_config=None)
    return UcmPromMetrics(config, kinds, ["model_name", "engine"], per_engine), registry


def test_workers_are_added_up_and_every_name_is_exported_once() -> None:
    """B41: the counts of two workers and the scheduler, as vLLM aggregates them over one step."""
    total = UcmStats(data={"load_blocks": 3, "load_failed_blocks|miss": 1, "cache_slots|free": 7})
    total = total.aggregate(UcmStats(data={"load_blocks": 2, "cache_slots|free": 7}))
    total = total.aggregate(UcmStats(data={"requests": 1}))
    metrics, registry = _exported({0: ["m", "0"], 1: ["m", "1"]})
    metrics.observe(total.data, 0)
    metrics.observe({"load_blocks": 7}, 1)
    text = generate_latest(registry).decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    ours = [n for n in names if n.endswith("_total")]
    assert sorted(ours) == sorted(f"ucm:ucm_{name}_total" for name in EXPORTED)
    assert 'ucm:ucm_load_blocks_total{engine="0",model_name="m"} 5.0' in text
    assert 'ucm:ucm_load_blocks_total{engine="1",model_name="m"} 7.0' in text
    assert 'ucm:ucm_load_failed_blocks_total{engine="0",kind="miss",model_name="m"} 1.0' in text
    assert 'ucm:ucm_anomalies_total{engine="0",model_name="m"} 0.0' in text
    others = {name for name in names if not name.endswith(("_total", "_created"))}
    assert others == {f"ucm:ucm_{name}" for name in GAUGES}
    assert 'ucm:ucm_cache_slots{engine="0",kind="free",model_name="m"} 7.0' in text
    metrics.observe({"cache_slots|free": 4}, 0)
    text = generate_latest(registry).decode()
    assert 'ucm:ucm_cache_slots{engine="0",kind="free",model_name="m"} 4.0' in text


def test_metrics_are_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    for name in EXPORTED:
        assert f"`ucm:ucm_{name}_total`" in page
    for name in GAUGES:
        assert f"`ucm:ucm_{name}`" in page
