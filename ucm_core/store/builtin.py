"""The core's own plugin: stages that need nothing, for measuring and for tests; and the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from ucm_core import _native
from ucm_core.config.options import Options
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import DeviceSpec, PipelineSpec, StageContext, StageSpec
from ucm_core.store.devices import register_devices
from ucm_core.store.native_store import native_geometry

UCM_API_VERSION = (1, 1)

#: Media of Fake stages by name, so that a second store in this process finds what the first wrote.
_media: dict[str, _native.FakeMedium] = {}


class EmptyConfig(Options):
    """The stage `Empty` has no options."""


class FakeConfig(Options):
    """Options of the stage `Fake`: an in-memory medium with stated behaviour."""

    fake_medium: str = Field(
        "", description="Name of an in-process medium to share; empty: a new one for this store."
    )
    fake_latency_us: int = Field(0, ge=0, description="Service time of an operation, microseconds.")
    fake_bytes_per_second: int = Field(0, ge=0, description="Bandwidth per lane; 0: unlimited.")
    fake_lanes: int = Field(1, gt=0, le=64, description="Operations served at one time.")
    fake_fail_nth_read: int = Field(0, ge=0, description="Every n-th read fails; 0: none.")
    fake_fail_nth_write: int = Field(0, ge=0, description="Every n-th write fails; 0: none.")
    fake_capacity_objects: int = Field(0, ge=0, description="Objects it holds; 0: unlimited.")


def named_medium(name: str) -> _native.FakeMedium:
    """The in-process medium of that name, made on first use; "" is always a new one."""
    return _media.setdefault(name, _native.FakeMedium()) if name else _native.FakeMedium()


def _build_empty(context: StageContext, config: Any, below: Any) -> _native.Stage:
    del config, below
    return _native.empty_stage(native_geometry(context.geometry))


def _build_fake(context: StageContext, config: FakeConfig, below: Any) -> _native.Stage:
    del below
    medium = named_medium(config.fake_medium)
    if config.fake_capacity_objects:
        medium.set_capacity(config.fake_capacity_objects)
    return _native.FakeStage(
        native_geometry(context.geometry),
        medium,
        latency_us=config.fake_latency_us,
        bytes_per_second=config.fake_bytes_per_second,
        lanes=config.fake_lanes,
        fail_nth_read=config.fake_fail_nth_read,
        fail_nth_write=config.fake_fail_nth_write,
    )


@hookimpl
def ucm_register_stages(register: Callable[[StageSpec], None]) -> None:
    register(
        StageSpec(
            "Empty",
            "accepts every object, finds none: nothing persists",
            EmptyConfig,
            _build_empty,
            guarded=False,
        )
    )
    register(
        StageSpec(
            "Fake", "in-memory medium with injectable faults, for tests", FakeConfig, _build_fake
        )
    )


@hookimpl
def ucm_register_pipelines(register: Callable[[PipelineSpec], None]) -> None:
    register(PipelineSpec("Empty", ("Empty",), "measures the copies alone; nothing persists"))
    register(PipelineSpec("Fake", ("Fake",), "in-process memory, for tests"))


@hookimpl
def ucm_register_devices(register: Callable[[DeviceSpec], None]) -> None:
    register_devices(register)
