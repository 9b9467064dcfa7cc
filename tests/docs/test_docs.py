"""Documentation covers every hook, option, metric and command, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ucm_core import hookspecs
from ucm_core.cli import build_cli
from ucm_core.config.schema import sections
from ucm_core.plugins import PluginHost, PluginStatus

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HOOKS = [name for name in vars(hookspecs) if name.startswith("ucm_")]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.glob("*.md"))]


def test_generated_pages_are_current() -> None:
    command = [sys.executable, str(ROOT / "dev" / "docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_plugin_of_this_tree_loads() -> None:
    """Else the generated page would miss its options without anyone noticing."""
    reports = {r.name: r for r in PluginHost(env={}).reports}
    for name in (
        "posix",
        "vllm",
        "sglang",
        "trtllm",
        "reference",
        "ucm-core-builtin",
        "ucm-core-retention",
    ):
        assert reports[name].status is PluginStatus.LOADED, reports[name].reason


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_documented(hook: str) -> None:
    function = getattr(hookspecs, hook)
    assert function.__doc__
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    assert f"| `{hook}({', '.join(names)})` |" in (DOCS / "plugin-guide.md").read_text()


def test_every_option_has_help_and_is_in_the_reference() -> None:
    page = (DOCS / "options.md").read_text()
    for title, _, model in sections(PluginHost(env={})):
        for key, info in model.model_fields.items():
            assert info.description, f"{title}: {key} has no description"
            assert re.search(rf"^\| `{key}[`.]", page, re.M), f"{title}: {key} is not in options.md"


def test_every_command_and_option_is_documented() -> None:
    page = (DOCS / "cli.md").read_text()
    for name, command in build_cli().commands.items():
        section = re.search(rf"^## `ucm {name}`$(.*?)(?=^## |\Z)", page, re.M | re.S)
        assert section, f"docs/cli.md has no section for `ucm {name}`"
        assert command.help
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"ucm {name} {parameter.opts}: no help"
                for option in parameter.opts:
                    assert f"`{option}`" in section.group(1), f"ucm {name} {option}"


def test_environment_variables_are_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    sources = "".join(p.read_text() for p in (ROOT / "ucm_core").rglob("*.py"))
    used = set(re.findall(r'"(UCM_[A-Z_]+|TRTLLM_UCM_[A-Z_]+)"', sources)) - {"UCM_API_VERSION"}
    assert used
    undocumented = {name for name in used if name not in text and not name.startswith("TRTLLM_")}
    assert not undocumented


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_named_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)`", page.read_text()))
        assert named <= targets, f"{page.name} names {named - targets}"
