"""What is refused at start, with the reason; where the configuration comes from; the two homes."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import stub_interface
from prompts import SHARED, warm_up
from stub_manager import StubRequest
from stub_memory import RankMemory, Shape
from stub_world import World
from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.plugins import PluginHost
from ucm_trtllm import pools
from ucm_trtllm.homes import interface


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        ({"max_beam_width": 4}, "one beam"),
        ({"kv": {"host_cache_size": 1 << 30}}, "host_cache_size"),
        ({"kv": {"disk_cache_size": 1 << 30}}, "disk_cache_size"),
        ({"sparse_attention_config": object()}, "sparse_attention_config"),
        ({"tensor_parallel_size": 16, "gpus_per_node": 8}, "over nodes of 8"),
        ({"model": "/nowhere"}, "no config.json"),
        ({"kv": {"max_attention_window": [64]}}, "use_kv_cache_manager_v2"),
    ],
)
def test_refusals_name_the_reason(world: World, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason), world.engine(args=changes):
        pass


def test_all_reasons_at_once(world: World) -> None:
    changes = {"max_beam_width": 2, "pipeline_parallel_size": 2}
    with (
        pytest.raises(UnsupportedError, match="max_beam_width") as caught,
        world.engine(args=changes),
    ):
        pass
    assert "pipeline_parallel_size" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 3}, "config.json has 3"),
        ({"num_key_value_heads": 3}, "no whole number of tokens"),
        ({"kv_lora_rank": 4}, "config.json describes MLA"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "KV heads of this model"),
    ],
)
def test_memory_that_contradicts_the_checkpoint(
    new_world: World, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    from ucm_core.identity import model_config

    read = model_config.read_config
    monkeypatch.setattr(model_config, "read_config", lambda path: {**(read(path) or {}), **changes})
    with pytest.raises(UnsupportedError, match=reason), new_world.engine():
        pass


def test_a_wrong_configuration_is_told_whole(world: World) -> None:
    world.configure(block_tokens=-1, promise_wait_ms="soon")
    with pytest.raises(ConfigError) as caught, world.engine():
        pass
    assert "block_tokens" in str(caught.value) and "promise_wait_ms" in str(caught.value)


def test_a_buffer_too_small_for_one_block(world: World) -> None:
    world.configure(promise_buffer_gb="1 KiB")
    with pytest.raises(ConfigError, match=r"promise_buffer_gb is 1 KiB.*one block"), world.engine():
        pass


def test_either_variable_names_the_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own prefix reaches the processes it spawns, ours where ranks inherit everything."""
    import os

    file = os.environ["TRTLLM_UCM_CONFIG_FILE"]
    monkeypatch.delenv("TRTLLM_UCM_CONFIG_FILE")
    monkeypatch.setenv("UCM_CONFIG_FILE", file)
    with world.engine() as engine:
        engine.run(StubRequest(1, SHARED))
    assert world.files()


def test_no_known_home_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UnsupportedError, match=r"connectors\.kv_cache_connector"):
        interface()


def test_a_home_that_breaks_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing inside the engine is the engine's error."""
    import importlib

    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="mpi4py"):
        interface()


@pytest.mark.parametrize("new", [False, True])
def test_every_method_has_the_arguments_of_the_interface(new: bool) -> None:
    base_worker = stub_interface.NewWorker if new else stub_interface.OldWorker
    base_scheduler = stub_interface.NewScheduler if new else stub_interface.OldScheduler
    with stub_interface.installed(new) as module:
        for ours, base in ((module.UCMWorker, base_worker), (module.UCMScheduler, base_scheduler)):
            assert not ours.__abstractmethods__
            for name, method in inspect.getmembers(base, inspect.isfunction):
                if not name.startswith("_"):
                    wanted = list(inspect.signature(method).parameters)
                    assert list(inspect.signature(getattr(ours, name)).parameters) == wanted, name


def test_attention_data_parallelism(new_world: World) -> None:
    """Every rank schedules for itself, into one namespace."""
    args = {"enable_attention_dp": True, "tensor_parallel_size": 2}
    with new_world.engine(v2=True, owner=1, args=args) as engine:
        assert engine.manager.scheduler.supports_attention_dp
        engine.run(StubRequest(1, SHARED))
    with new_world.engine(v2=True, owner=0, args=args) as engine:
        request = StubRequest(2, SHARED + [7])
        engine.run(request)
        assert request.matched == [(0, 256)]


def test_without_block_reuse_nothing_is_promised(world: World) -> None:
    """The engine asks all the same, and then takes none of it."""
    with world.engine() as engine:
        engine.run(StubRequest(1, SHARED))
    with world.engine(args={"kv": {"enable_block_reuse": False}}) as engine:
        request = StubRequest(2, SHARED + [7])
        engine.run(request)
        assert request.matched == [(0, 0)]


def test_the_plugin_says_how_it_is_turned_on() -> None:
    spec = PluginHost(env={}).load().engines["trtllm"]
    assert "ucm_trtllm.connector" in spec.turn_on and "UCMWorker" in spec.turn_on


def test_before_memory_is_registered_everything_is_a_miss(new_world: World) -> None:
    with stub_interface.installed(True) as module:
        args = new_world.args(Shape())
        scheduler, worker = module.UCMScheduler(args), module.UCMWorker(args)
        try:
            request = StubRequest(1, SHARED)
            assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
            scheduler.update_state_after_alloc(request, [0])
            output = stub_interface.NewSchedulerOutput()
            worker.bind_connector_meta(scheduler.build_connector_meta(output))
            worker.start_load_kv(None)
            worker.wait_for_save(None)
            assert worker.get_finished([1], []) == ([1], [])
            assert scheduler.request_finished(request, []) is False
            worker.register_kv_caches(RankMemory(Shape(), range(2)).tensor())
            with pytest.raises(UnsupportedError, match="twice"):
                worker.register_kv_caches(RankMemory(Shape(), range(2)).tensor())
        finally:
            worker.shutdown()
            scheduler.shutdown()


def _region(size: int = 64, roles: tuple[str, ...] = ("key", "value"), **more: Any) -> Any:
    buffers = tuple(SimpleNamespace(layer_id=0, role=role, **more) for role in roles)
    return SimpleNamespace(base=4096, size=size, stride=size, num_slots=4, buffers=buffers)


@pytest.mark.parametrize(
    ("regions", "reason"),
    [
        ([_region(65)], "different size"),
        ([_region(expansion=2)], "another number of tokens"),
        ([_region(roles=("value",))], "K of"),
    ],
)
def test_regions_that_cannot_be_addressed(regions: list[Any], reason: str) -> None:
    group = SimpleNamespace(layer_group_id=0, layer_ids=(0,), window_size=None, regions=regions)
    layout = SimpleNamespace(tokens_per_block=8, groups=(group,))
    with pytest.raises(UnsupportedError, match=reason):
        pools.pool_of_layout(layout, ("cpu", 0))


def test_pool_tensors_of_another_shape() -> None:
    tensor = RankMemory(Shape(), range(2)).tensor()
    tensor.shape = tensor.shape[:3]
    with pytest.raises(UnsupportedError, match="expected"):
        pools.pool_of_tensor(tensor)


def test_a_rank_that_cannot_reach_the_verified_blocks(
    new_world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is promised while a rank could not copy it."""
    from ucm_trtllm.arena import Arena

    with new_world.engine(ranks=2) as engine:
        engine.run(StubRequest(1, SHARED))

    def out_of_reach(name: Any) -> Any:
        raise PermissionError(13, "Permission denied", name.path)

    monkeypatch.setattr(Arena, "attach", out_of_reach)
    with new_world.engine(ranks=2) as engine:
        warm_up(engine)
        request = StubRequest(2, SHARED + [7])
        engine.run(request)
        assert request.matched == [(0, 0)]
    assert "out of reach for rank 1" in caplog.text
