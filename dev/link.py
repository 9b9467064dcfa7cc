"""Link distributions of this checkout into a virtual environment, without copying and without pip.

usage: link.py SITE_PACKAGES PROJECT_DIR[:SOURCE_DIR]...

Each project's own metadata (name, version, entry points, scripts) is written to SITE_PACKAGES and its
source directory is put on the path. Changed Python is used at once; changed metadata after linking
again. Nothing is fetched, so no name of ours is ever looked up in a registry.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyproject_hooks

from build import ProjectBuilder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCRIPT = """#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


def link(site: Path, project: Path, source: Path) -> str:
    """Link one project; returns its distribution's name. Replaces an earlier link of it."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    name = table["name"].replace("-", "_").lower()
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory() as scratch:
        builder = ProjectBuilder(project, runner=pyproject_hooks.quiet_subprocess_runner)
        built = Path(builder.metadata_path(scratch))
        info = site / built.name
        shutil.copytree(built, info)
    # Not every build backend writes entry points before it builds a wheel.
    (info / "entry_points.txt").write_text(entry_points(table))
    (info / "INSTALLER").write_text("link.py\n")
    pth = site / f"_ucm_tree_{name}.pth"
    pth.write_text(f"{source}\n")
    files = [pth, *(f for f in info.rglob("*") if f.is_file())]
    files += write_scripts(site, table.get("scripts", {}))
    record = "".join(f"{os.path.relpath(file, site)},,\n" for file in [*files, info / "RECORD"])
    (info / "RECORD").write_text(record)
    return name


def entry_points(table: dict[str, Any]) -> str:
    """The text of ``entry_points.txt`` for a ``[project]`` table."""
    groups = {"console_scripts": table.get("scripts", {}), **table.get("entry-points", {})}
    return "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) + "\n"
        for group, points in groups.items()
        if points
    )


def write_scripts(site: Path, scripts: dict[str, str]) -> list[Path]:
    """Write console scripts into the environment's ``bin``."""
    bin_dir = site.parents[2] / "bin"
    written = []
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        path = bin_dir / name
        path.write_text(SCRIPT.format(python=bin_dir / "python", module=module, function=function))
        path.chmod(0o755)
        written.append(path)
    return written


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    site = Path(sys.argv[1]).resolve()
    for argument in sys.argv[2:]:
        project, _, source = argument.partition(":")
        name = link(site, Path(project).resolve(), Path(source or project).resolve())
        print(f"linked {name} <- {project}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
