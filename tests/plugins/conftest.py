"""A site directory of really installed (on disk) plugins, good and broken."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from ucm_core.plugins import PluginHost, discover

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


class Site:
    """A folder that acts as site-packages. ``install`` writes a module and its dist-info."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self,
        name: str,
        source: str,
        *,
        module: str = "",
        distribution: str = "",
        entry_points: str | None = None,
        metadata: str | None = None,
    ) -> None:
        module = module or f"zoo_{name}"
        distribution = distribution or f"zoo-{name}"
        (self.path / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        if metadata is None:
            metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n"
        (info / "METADATA").write_text(metadata)
        if entry_points is None:
            entry_points = f"[ucm]\n{name} = {module}\n"
        (info / "entry_points.txt").write_text(entry_points)

    def good(self, name: str, stage: str) -> None:
        self.install(name, GOOD.format(stage=stage))

    def host(self, **env: str) -> PluginHost:
        """A host that sees this site alone."""
        return PluginHost(env=env, candidates=discover(distributions(path=[str(self.path)])))


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
