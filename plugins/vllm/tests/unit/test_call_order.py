"""The order in which vLLM calls a worker's connector, from vLLM's own driver of model runner V2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from scripted_engine import World, expected, prompt

BEFORE = ["handle_preemptions", "bind_connector_metadata"]
AFTER = [
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
]


class _Recorder:
    """Passes every call on to the real connector and keeps its name."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._connector, name)

        def called(*args: Any, **kw: Any) -> Any:
            self.calls.append(name)
            return target(*args, **kw)

        return called


@pytest.fixture
def driven(engine, world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose real worker side hangs under vLLM's driver; returns (engine, driver, recorder)."""
    e = engine(runner="v2")
    recorder = _Recorder(e.worker)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", recorder)
    caches = {layer.name: e.memory[layer.slot] for layer in e.layers}
    e.runner.driver = ActiveKVConnector(e.config, caches)
    assert recorder.calls == ["register_kv_caches", "set_host_xfer_buffer_ops"]
    recorder.calls.clear()
    return e, e.runner.driver, recorder


def test_asynchronous_loads_start_after_the_forward_pass(driven: Any) -> None:
    e, _, recorder = driven
    e.add("a", prompt(1, 100), max_tokens=2)
    e.step()
    assert recorder.calls == [*BEFORE, "finish_forward", "start_load_kv", *AFTER]


def test_a_step_that_computes_nothing_has_the_same_calls(driven: Any) -> None:
    e, _, recorder = driven
    e.step()
    assert recorder.calls == [*BEFORE, "finish_forward", "start_load_kv", *AFTER]


def test_synchronous_loads_start_before_the_forward_pass(driven: Any) -> None:
    e, driver, recorder = driven
    output = e.scheduler.schedule()
    output.has_sync_kv_loads = True
    driver.pre_forward(output, SimpleNamespace(idx_mapping=None, req_ids=[], num_tokens=0))
    assert recorder.calls == [*BEFORE, "start_load_kv"]
    driver.finish_forward()
    driver.post_forward(set())
    assert recorder.calls[3:] == ["finish_forward", *AFTER]


def test_saves_and_loads_work_under_it(driven: Any, engine, world: World) -> None:
    e, _, recorder = driven
    tokens = prompt(2, 200)
    wanted = e.generate("a", tokens)
    assert len(world.objects) == 3
    e.scheduler.reset_prefix_cache()
    assert e.generate("b", tokens) == wanted
    assert e.counted["hit_tokens"] == 192
    assert e.pending() == {}
    assert "save_kv_layer" not in recorder.calls, "the scripted model calls the layer hooks itself"


@pytest.mark.parametrize("drained", [True, False])
def test_sleep_mode_of_0_33(engine, world: World, drained: bool) -> None:
    """The memory of the KV cache goes and comes back empty: copies that vLLM did not wait for are given up,
    never taken from memory that is not there, and what was stored serves the request after it."""
    tokens, other = prompt(3, 200), prompt(4, 200)
    engine().generate("seed", tokens)
    world.auto = drained
    e = engine(runner="0.33")
    e.add("a", other, max_tokens=1)
    e.step()
    for _ in range(5 if drained else 0):
        e.step()
    e.runner.sleep()
    assert all(task.check() for task in e.all_tasks())
    e.run()
    assert e.counted.get("save_failed_blocks|cancelled", 0) == (0 if drained else 3)
    e.scheduler.reset_prefix_cache()
    world.auto = True
    for store in e.stores:
        store.auto = True
    assert e.generate("b", tokens) == expected(tokens, 4)
    assert e.counted["hit_tokens"] == 192
    e.check_idle()
    assert len(world.objects) == (6 if drained else 3)
