"""Kinds of engine memory: registered by plugins, opened when an engine shows memory there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from ucm_core import _native
from ucm_core.errors import PluginError, UnsupportedError
from ucm_core.plugins import PluginHost
from ucm_core.registry import StageContext
from ucm_core.store.config import StoreConfig
from ucm_core.store.contract import Status
from ucm_core.store.pipeline import open_store
from ucm_core.testing.blocks import EngineMemory, geometry_of
from ucm_core.testing.plugin_site import PluginSite

STUB = Path(_native.__file__).resolve().parent.parent / "build/dev/native/libucm_stub_cuda.so"

NPU = """
from ucm_core import _native
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import DeviceSpec
UCM_API_VERSION = (1, 1)
@hookimpl
def ucm_register_devices(register):
    register(DeviceSpec("{name}", "somebody's accelerator", lambda index: _native.host_device()))
"""


@pytest.fixture
def host() -> PluginHost:
    return PluginHost(env={}).load()


def test_the_core_brings_host_memory_and_cuda(host: PluginHost) -> None:
    assert {"cpu", "cuda"} <= set(host.devices)
    assert host.device("cpu").open(3).name == "host"


def test_a_machine_without_a_driver_says_so(host: PluginHost) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(UnsupportedError, match=r"libcuda\.so\.1.*install the NVIDIA driver"):
            host.device("cuda").open(0)
    else:
        with pytest.raises(UnsupportedError, match="cuda:99"):
            host.device("cuda").open(99)


def test_plugins_register_devices_and_names_are_unique(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    site = PluginSite(tmp_path)
    site.install("accelerator", NPU.format(name="npu"))
    site.install("impostor", NPU.format(name="npu"))
    host = site.host()
    assert host.device("npu").summary == "somebody's accelerator"
    with pytest.raises(PluginError, match="unknown device 'nqu'.*did you mean 'npu'"):
        host.device("nqu")
    (impostor,) = [r for r in host.reports if r.name == "impostor"]
    assert "device 'npu' is registered by" in impostor.reason


def test_a_store_copies_through_the_device_it_was_given(host: PluginHost) -> None:
    assert STUB.exists(), f"{STUB} is missing: run `make native`"
    device = _native.cuda_device(0, library=str(STUB))
    geometry = geometry_of()
    context = StageContext(geometry, "ns", b"\0" * 32, "worker")
    options: dict[str, Any] = {
        "stages": host.stages,
        "pipelines": host.pipelines,
        "stage_configs": {},
        "store_config": StoreConfig(staging_buffer_gb=4 << 20),
        "context": context,
    }
    with open_store("Fake", device=device, **options) as store:
        pinned = store.stats()["cuda:0.pinned_bytes"]
        assert pinned == store.stats()["staging.buffers"] * store.stats()["staging.buffer_bytes"]
        source = EngineMemory.whole(geometry, range(3)).fill()
        task = store.dump(source.ids, source.shards, source.addresses)
        assert (task.wait_durable() == Status.OK).all()
        target = EngineMemory.whole(geometry, range(3))
        assert (store.load(target.ids, target.shards, target.addresses).wait() == Status.OK).all()
        assert all(target.right(row) for row in range(len(target.rows)))
        with pytest.raises(ValueError, match="event 5 is not known to device cuda:0"):
            store.dump(source.ids, source.shards, source.addresses, event=5)
    assert device.stats()["pinned_bytes"] == 0
