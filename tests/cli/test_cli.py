"""The ``ucm`` command, run as a process with plugins installed on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ucm_core.testing.plugin_site import PluginSite

PLUGIN = '''
import click
from pydantic import Field
from ucm_core.config.options import Chosen, Options
from ucm_core.config.units import Directories, GibAsBytes
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import HostMemory, PipelineSpec, StageSpec

UCM_API_VERSION = (1, 0)

class Shelf(Options):
    storage_backends: Directories = Field(description="roots")
    shelf_gb: GibAsBytes = Field(2 << 30, description="size of the shelf")

def build(context, options, below):
    return None

@hookimpl
def ucm_register_stages(register):
    register(StageSpec("Shelf", "a shelf", Shelf, build,
             host_memory=lambda o: HostMemory(per_rank_bytes=1 << 20, per_node_bytes=o.shelf_gb)))

@hookimpl
def ucm_register_pipelines(register):
    register(PipelineSpec("Shelf", ("Shelf",), "one shelf"))

@hookimpl
def ucm_register_commands(cli):
    @cli.command("shelf")
    def shelf():
        """Say where the shelf is."""
        click.echo("on the wall")

@hookimpl
def ucm_report_header(context):
    return "shelf: made of " + context["role"]
'''


class Ucm:
    def __init__(self, folder: Path) -> None:
        self.site = PluginSite(folder)
        self.env = {**os.environ, "PYTHONPATH": str(folder), "HOME": str(folder), "COLUMNS": "200"}
        self.env.pop("UCM_CONFIG_FILE", None)

    def __call__(self, *arguments: str, code: int = 0, **env: str) -> str:
        """Run; returns stdout, or stderr when failing is expected."""
        done = subprocess.run(
            [sys.executable, "-m", "ucm_core.cli.main", *arguments],
            env={**self.env, **env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout


@pytest.fixture
def ucm(tmp_path: Path) -> Ucm:
    ucm = Ucm(tmp_path)
    ucm.site.install("shelf", PLUGIN)
    return ucm


def test_plugins(ucm: Ucm) -> None:
    ucm.site.install("zoo", "import not_there_at_all")
    out = ucm("plugins")
    assert "stage Shelf, pipeline Shelf" in out
    assert "zoo: import failed: ModuleNotFoundError: No module named 'not_there_at_all'" in out
    assert "made of" not in out
    assert "shelf: made of tool" in ucm("plugins", "-v")
    listed = {p["name"]: p["status"] for p in json.loads(ucm("plugins", "--json"))}
    assert (listed["shelf"], listed["zoo"]) == ("loaded", "broken")


def test_plugins_of_a_disabled_one(ucm: Ucm) -> None:
    out = ucm("plugins", UCM_DISABLED_PLUGINS="shelf")
    assert "named in UCM_DISABLED_PLUGINS" in out
    assert "stage Shelf" not in out


def test_config_values_sources_and_memory(ucm: Ucm, tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text("store_pipeline: Shelf\nstorage_backends: /data\nshelf_gb: 3 GiB\n")
    out = ucm("config", "--file", str(path), "--ranks", "4")
    rows = [line.split() for line in out.splitlines()]
    assert ["Shelf", "shelf_gb", "3", "GiB", f"{path}:3"] in rows
    assert ["store", "timeout_ms", "30", "s", "default"] in rows
    assert "host memory of stage Shelf: 1 MiB per worker, 3 GiB per node" in out
    assert "4 worker(s) on this node: 3.004 GiB" in out
    told = json.loads(ucm("config", "--file", str(path), "--json", "--ranks", "4"))
    assert told["host_memory"]["total_bytes"] == (3 << 30) + 4 * (1 << 20)
    assert ["/data"] in [o["value"] for o in told["options"]]


def test_config_inline_and_environment(ucm: Ucm, tmp_path: Path) -> None:
    inline = json.dumps({"store_pipeline": "Shelf", "storage_backends": "/d", "shelf_gb": 1})
    assert "1 GiB" in ucm("config", "--inline", inline)
    path = tmp_path / "env.yaml"
    path.write_text("store_pipeline: Shelf\nstorage_backends: /e\n")
    assert "/e" in ucm("config", UCM_CONFIG_FILE=str(path))


def test_wrong_config_lists_all_problems_and_fails(ucm: Ucm) -> None:
    inline = json.dumps({"store_pipeline": "Shelf", "storage_backends": "x", "shelf_bg": 1})
    err = ucm("config", "--inline", inline, code=1)
    assert "2 problems" in err
    assert "did you mean 'shelf_gb'" in err
    assert "relative" in err
    assert "not JSON" in ucm("config", "--inline", "{", code=1)
    assert "No such command" in ucm("confg", code=2)


def test_broken_plugin_named_by_the_configuration_is_fatal(ucm: Ucm) -> None:
    ucm.site.install("late", PLUGIN.replace("Shelf", "Late").replace("shelf", "late") + "\n1/0\n")
    source = PLUGIN.replace("Shelf", "Half").replace("shelf", "half")
    ucm.site.install("half", source.replace('"one half")', '"one half"), oops'))
    inline = json.dumps({"store_pipeline": "Half", "storage_backends": "/d"})
    err = ucm("config", "--inline", inline, code=1)
    assert "plugin 'half' (zoo-half 1.2) is broken" in err


def test_schema_and_reference_follow_the_plugins(ucm: Ucm) -> None:
    schema = json.loads(ucm("config", "--schema"))
    options = schema["properties"]["ucm_connectors"]["items"]["properties"]["ucm_connector_config"]
    assert options["properties"]["shelf_gb"]["description"] == "size of the shelf"
    assert "Shelf" in options["properties"]["store_pipeline"]["enum"]
    assert "timeout_ms" in options["properties"]
    assert "block_tokens" in schema["properties"]
    assert "| `shelf_gb` | `2 GiB` | size of the shelf |" in ucm("config", "--reference")


def test_command_of_a_plugin(ucm: Ucm) -> None:
    assert ucm("shelf") == "on the wall\n"
    assert "shelf" in ucm("--help")


def test_version(ucm: Ucm) -> None:
    from ucm_core import __version__

    assert __version__ in ucm("--version")
