"""Plugins installed for a test: real modules and real metadata in a folder of their own."""

from __future__ import annotations

import textwrap
from importlib.metadata import distributions
from pathlib import Path

from ucm_core.plugins import PluginHost, discover


class PluginSite:
    """A folder that acts as site-packages; the test puts it on ``sys.path``."""

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
        """Write a plugin: ``source`` as module ``zoo_<name>`` and a dist-info with its entry point."""
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

    def host(self, **env: str) -> PluginHost:
        """A host that sees this site alone."""
        return PluginHost(env=env, candidates=discover(distributions(path=[str(self.path)])))
