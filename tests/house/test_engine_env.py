"""Engine environments: built once, reused, built again when half-built or when a lock changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Tree:
    """A checkout with one engine whose locks are empty, and a cache of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "dev").mkdir(parents=True)
        shutil.copy(ROOT / "dev" / "engine_env.py", path / "dev")
        self.env_dir = path / "plugins" / "toy" / "env"
        self.env_dir.mkdir(parents=True)
        (self.env_dir / "1-first.lock").write_text("# nothing\n")
        (self.env_dir / "check.py").write_text("import json\n")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.path / "dev" / "engine_env.py"), "toy", *arguments]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "XDG_CACHE_HOME": str(self.path / "cache")}

    def build(self, *arguments: str) -> tuple[Path, str]:
        done = subprocess.run(
            self.command(*arguments), env=self.env, capture_output=True, text=True, check=True
        )
        return Path(done.stdout.strip()), done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


def test_half_built_is_built_again(tree: Tree) -> None:
    (tree.env_dir / "check.py").write_text("raise SystemExit(1)\n")
    failed = subprocess.run(tree.command(), env=tree.env, capture_output=True, text=True)
    assert failed.returncode != 0
    path, _ = tree.build("--path-only")
    assert path.exists()
    assert not (path / ".complete").exists()
    (path / "leftover").touch()
    (tree.env_dir / "check.py").write_text("")
    path, said = tree.build()
    assert "half-built" in said
    assert (path / ".complete").exists()
    assert not (path / "leftover").exists()


def test_two_builders_build_once_then_reuse_until_a_lock_changes(tree: Tree) -> None:
    builders = [
        subprocess.Popen(
            tree.command(),
            env=tree.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    told = [builder.communicate() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert told[0][0] == told[1][0]
    assert sum("building" in stderr for _, stderr in told) == 1
    path, said = tree.build()
    assert (f"{path}\n", said) == (told[0][0], "")
    (tree.env_dir / "1-first.lock").write_text("# something else\n")
    assert tree.build("--path-only")[0] != path
