"""A plugin host with three stages whose options are like the real ones, and a fixed machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ucm_core.config.load import load_config
from ucm_core.config.machine import Machine
from ucm_core.config.model import UcmConfig
from ucm_core.errors import ConfigError
from ucm_core.plugins import PluginHost
from ucm_core.testing.plugin_site import PluginSite

PLUGIN = """
from typing import Literal
from pydantic import Field, model_validator
from ucm_core.config.options import Chosen, Options
from ucm_core.config.units import Directories, GibAsBytes
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import HostMemory, PipelineSpec, StageSpec

UCM_API_VERSION = (1, 0)

class Files(Options):
    storage_backends: Directories = Field(description="roots")
    io_direct: bool = Field(True, description="bypass the page cache")
    posix_io_engine: Literal["auto", "psync", "aio", "io_uring"] = Field("auto", description="engine")

    @model_validator(mode="after")
    def _aio_needs_direct(self):
        if self.posix_io_engine == "aio" and not self.io_direct:
            raise ValueError("posix_io_engine 'aio' needs io_direct")
        return self

class Health(Options):
    enabled: bool = Field(True, description="on")
    failure_threshold: int = Field(2, gt=0, description="failures")

class Cached(Options):
    cache_buffer_capacity_gb: GibAsBytes = Field(description="size")
    io_direct: bool = Field(True, description="same key as below")
    health: Health = Field(Health(), description="nested")

    @classmethod
    def choose(cls, given, machine):
        return {"cache_buffer_capacity_gb": Chosen("2 GiB", "because of the test")}

class Nothing(Options):
    pass

def build(context, options, below):
    return None

@hookimpl
def ucm_register_stages(register):
    register(StageSpec("Posix", "files", Files, build))
    register(StageSpec("Cache", "host cache", Cached, build, needs_below=True,
             host_memory=lambda o: HostMemory(per_node_bytes=o.cache_buffer_capacity_gb)))
    register(StageSpec("Empty", "nothing", Nothing, build))

@hookimpl
def ucm_register_pipelines(register):
    register(PipelineSpec("Cache|Posix", ("Cache", "Posix"), "cache over files"))
    register(PipelineSpec("Posix", ("Posix",), "files"))
    register(PipelineSpec("Empty", ("Empty",), "nothing is kept"))
"""

MACHINE = Machine(
    total_memory_bytes=64 << 30, available_memory_bytes=32 << 30, shm_free_bytes=8 << 30, cpus=4
)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginHost]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    site = PluginSite(folder)
    site.install("stages", PLUGIN)
    host = site.host()
    assert len(host.stages) == 3, host.reports
    yield host
    del sys.modules["zoo_stages"]


class Loading:
    """``load`` with the fixed machine; ``problems`` of a configuration that must fail."""

    def __init__(self, host: PluginHost) -> None:
        self.host = host
        self.env: dict[str, str] = {"HOME": "/home/somebody"}

    def load(self, inline: Mapping[str, Any] | None = None, **env: str) -> UcmConfig:
        return load_config(inline, {**self.env, **env}, self.host, machine=MACHINE)

    def problems(self, inline: Mapping[str, Any] | None = None, **env: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self.load(inline, **env)
        for problem in caught.value.problems:
            assert problem in str(caught.value)
        return list(caught.value.problems)


@pytest.fixture
def loading(host: PluginHost) -> Loading:
    return Loading(host)


def connector(pipeline: str = "Posix", **options: Any) -> dict[str, Any]:
    """The reference system's way of describing a store."""
    options = {"store_pipeline": pipeline, "storage_backends": "/data/kv", **options}
    return {
        "ucm_connectors": [
            {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": options}
        ]
    }
