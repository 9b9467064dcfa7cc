"""The core's own plugin goes the way of every plugin."""

from __future__ import annotations

from pathlib import Path

import pluggy
import pytest

from ucm_core import hookspecs
from ucm_core.registry import PipelineSpec, StageSpec
from ucm_core.store import builtin


def test_it_implements_the_hooks() -> None:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(builtin)
    manager.check_pending()
    stages: list[StageSpec] = []
    pipelines: list[PipelineSpec] = []
    manager.hook.ucm_register_stages(register=stages.append)
    manager.hook.ucm_register_pipelines(register=pipelines.append)
    assert {s.name for s in stages} == {"Empty", "Fake"}
    assert {stage for p in pipelines for stage in p.stages} <= {s.name for s in stages}
    assert builtin.UCM_API_VERSION[0] == hookspecs.API_VERSION[0]
    for stage in stages:
        for name, field in stage.config_model.model_fields.items():
            assert field.description, f"{stage.name}: option {name} has no help"


def test_the_entry_point_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib")
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["ucm"]["ucm-core-builtin"] == builtin.__name__
