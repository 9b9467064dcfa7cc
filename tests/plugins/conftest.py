"""A site directory of really installed (on disk) plugins, good and broken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ucm_core.testing.plugin_site import PluginSite

GOOD = """
from pydantic import BaseModel
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import PipelineSpec, StageSpec

UCM_API_VERSION = (1, 0)

class Options(BaseModel):
    depth: int = 4

@hookimpl
def ucm_register_stages(register):
    register(StageSpec("{stage}", "a stage", Options, lambda context, options, below: None))

@hookimpl
def ucm_register_pipelines(register):
    register(PipelineSpec("{stage}", ("{stage}",), "alone"))
"""


class Site(PluginSite):
    def good(self, name: str, stage: str) -> None:
        """Install a plugin that works and offers one stage and a pipeline of that name."""
        self.install(name, GOOD.format(stage=stage))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if name.startswith("zoo_"):
            del sys.modules[name]
