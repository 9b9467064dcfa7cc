"""Pipelines are built from registered stages; names and sizes that cannot work say what to do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ucm_core import _native
from ucm_core.config.reference import PIPELINE_HINTS
from ucm_core.config.units import parse_size_bytes
from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.registry import PipelineSpec, Role, StageContext, StageSpec
from ucm_core.store import builtin
from ucm_core.store.config import StoreConfig
from ucm_core.store.contract import Status
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.store.pipeline import open_store, staging_objects
from ucm_core.testing.blocks import EngineMemory, geometry_of, id_array


def registered() -> tuple[dict[str, StageSpec], dict[str, PipelineSpec]]:
    stages: dict[str, StageSpec] = {}
    pipelines: dict[str, PipelineSpec] = {}
    builtin.ucm_register_stages(lambda s: stages.update({s.name: s}))
    builtin.ucm_register_pipelines(lambda p: pipelines.update({p.name: p}))
    return stages, pipelines


def open_(
    name: str,
    stages: dict[str, StageSpec] | None = None,
    pipelines: dict[str, PipelineSpec] | None = None,
    configs: dict[str, Any] | None = None,
    role: Role = "worker",
    budget: str = "4 MiB",
    store: StoreConfig | None = None,
) -> NativeBlockStore:
    known_stages, known_pipelines = registered()
    return open_store(
        name,
        stages={**known_stages, **(stages or {})},
        pipelines={**known_pipelines, **(pipelines or {})},
        stage_configs=configs or {},
        store_config=(store or StoreConfig()).model_copy(
            update={"staging_buffer_gb": parse_size_bytes(budget)}
        ),
        context=StageContext(geometry_of(), "ns", b"\0" * 32, role),
    )


def test_fake_end_to_end_and_reopen() -> None:
    configs = {"Fake": builtin.FakeConfig(fake_medium="end-to-end")}
    with open_("Fake", configs=configs) as store:
        source = EngineMemory.whole(store.geometry, range(3)).fill()
        task = store.dump(source.ids, source.shards, source.addresses)
        assert (task.wait_durable() == Status.OK).all()
    with open_("Fake", configs=configs) as store:
        assert store.lookup_on_prefix(id_array(range(4))) == 2
    with open_("Fake") as store:  # a medium of its own
        assert store.lookup_on_prefix(id_array(range(4))) == -1


def test_stages_with_a_medium_stand_behind_the_health_wrapper_by_default() -> None:
    def guarded(name: str, role: Role = "worker", **health: Any) -> bool:
        config = StoreConfig(store_health=health)  # type: ignore[arg-type]
        with open_(name, role=role, store=config) as store:
            return any("health_open" in key for key in store.stats())

    assert guarded("Fake")
    assert guarded("Fake", role="scheduler"), "its lookups must not wait either"
    assert not guarded("Fake", enabled=False)
    assert not guarded("Fake", role="tool"), "tools want the medium's own answers"
    assert not guarded("Empty"), "it finds nothing by design"


def test_b56_requests_finish_as_misses_while_the_backend_hangs() -> None:
    geometry = geometry_of()
    fake = _native.FakeStage(native_geometry(geometry), _native.FakeMedium())
    stage = StageSpec("Hung", "", builtin.EmptyConfig, lambda *_: fake)
    health = {"interval_ms": 10, "timeout_ms": 500}
    store_config = StoreConfig(timeout_ms=20_000, store_health=health)  # type: ignore[arg-type]
    with open_(
        "Hung", {"Hung": stage}, {"Hung": PipelineSpec("Hung", ("Hung",), "")}, store=store_config
    ) as store:
        source = EngineMemory.whole(geometry, range(100)).fill()
        task = store.dump(source.ids, source.shards, source.addresses)
        assert (task.wait_durable() == Status.OK).all()
        fake.set_fault(5)  # every operation hangs
        while not store.stats()["Fake.health_open"]:
            time.sleep(0.005)
        assert "out of service" in store.health()["Fake"]

        started = time.monotonic()
        for number in range(100):
            target = EngineMemory.whole(geometry, [number])
            assert not store.lookup(target.ids).any()
            result = store.load(target.ids, target.shards, target.addresses).wait()
            assert (result == Status.MISS).all()
            assert target.untouched(0)
        assert time.monotonic() - started < 10.0, "not one of them waited for timeout_ms"

        fake.set_fault(0)
        fake.release_hung(serve=True)
        while store.stats()["Fake.health_open"]:
            time.sleep(0.005)
        target = EngineMemory.whole(geometry, [7])
        assert (store.load(target.ids, target.shards, target.addresses).wait() == Status.OK).all()
        assert target.right(0)


def test_empty_stores_nothing() -> None:
    with open_("Empty") as store:
        source = EngineMemory.whole(store.geometry, [1]).fill()
        task = store.dump(source.ids, source.shards, source.addresses)
        assert (task.wait_durable() == Status.OK).all()
        assert not store.lookup(id_array([1])).any()


def test_unknown_names() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown pipeline 'Fak' \(did you mean 'Fake'\?\); known"
    ):
        open_("Fak")
    with pytest.raises(ConfigError, match="pipeline 'X': unknown stage 'Fakee'"):
        open_("X", pipelines={"X": PipelineSpec("X", ("Fakee",), "")})


@pytest.mark.parametrize("name", sorted(PIPELINE_HINTS))
def test_vendor_names_are_answered_with_what_they_need(name: str) -> None:
    with pytest.raises(ConfigError, match="plugin"):
        open_(name)


def test_the_scheduler_role_has_no_buffers_and_moves_no_bytes() -> None:
    configs = {"Fake": builtin.FakeConfig(fake_medium="scheduler")}
    with open_("Fake", configs=configs) as store:
        source = EngineMemory.whole(store.geometry, [1]).fill()
        store.dump(source.ids, source.shards, source.addresses).wait_durable()
    with open_("Fake", configs=configs, role="scheduler", budget="1 KiB") as store:
        assert store.lookup(id_array([1, 2])).tolist() == [True, False]
        store.touch(id_array([1]))
        store.prefetch(id_array([1]))
        with pytest.raises(UnsupportedError, match="only looks up"):
            store.load(source.ids, source.shards, source.addresses)
        with pytest.raises(UnsupportedError, match="only looks up"):
            store.dump(source.ids, source.shards, source.addresses)
        assert not any(key.startswith("staging") for key in store.stats())


def test_a_budget_below_two_objects_names_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 are needed: set 32 KiB or more"):
        open_("Fake", budget="20 KiB")
    assert staging_objects(2 * 100, 100) == (1, 1)
    assert staging_objects(100 * 100, 100) == (25, 75)
    assert sum(staging_objects(1 << 40, 100)) == 4096


def spec(name: str, build: Any, needs_below: bool = False, guarded: bool = True) -> StageSpec:
    return StageSpec(name, "", builtin.EmptyConfig, build, needs_below=needs_below, guarded=guarded)


def test_stages_are_built_bottom_to_top_and_shut_down_on_failure() -> None:
    built: list[tuple[str, Any]] = []
    shut: list[str] = []

    class Lower:
        name = "Lower"

        def shutdown(self, timeout_s: float) -> None:
            shut.append("Lower")

    def lower(context: StageContext, config: Any, below: Any) -> Any:
        built.append(("Lower", below))
        return Lower()

    def upper(context: StageContext, config: Any, below: Any) -> Any:
        built.append(("Upper", below.name))
        raise RuntimeError("no room")

    stages = {
        "Lower": spec("Lower", lower, guarded=False),
        "Upper": spec("Upper", upper, needs_below=True),
    }
    pipelines = {"U|L": PipelineSpec("U|L", ("Upper", "Lower"), "")}
    with pytest.raises(RuntimeError, match="no room"):
        open_("U|L", stages, pipelines)
    assert built == [("Lower", None), ("Upper", "Lower")]
    assert shut == ["Lower"]


def test_host_memory_stands_on_top_of_a_stage() -> None:
    def memory(context: StageContext, config: Any, below: Any) -> Any:
        geometry = native_geometry(context.geometry)
        return _native.staging_tier(geometry, load_reserve=1, shared=1)

    stages = {"Memory": spec("Memory", memory, needs_below=True)}
    pipelines = {
        "Memory": PipelineSpec("Memory", ("Memory",), ""),
        "Fake|Memory": PipelineSpec("Fake|Memory", ("Fake", "Memory", "Fake"), ""),
        "Memory|Fake": PipelineSpec("Memory|Fake", ("Memory", "Fake"), ""),
    }
    with pytest.raises(ConfigError, match="stage 'Memory' needs another stage below it"):
        open_("Memory", stages, pipelines)
    with pytest.raises(ConfigError, match="must be the topmost stage"):
        open_("Fake|Memory", stages, pipelines)
    with open_("Memory|Fake", stages, pipelines) as store:
        assert store.stats()["staging.buffers"] == 2
