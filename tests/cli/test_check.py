"""`ucm check`, run as a process: what is stored comes back, or the operator reads why not (B40)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def check(folder: Path, pipeline: str, root: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "ucm.yaml"
    lines = [f'store_pipeline: "{pipeline}"', "timeout_ms: 5000"]
    if pipeline != "Empty":
        lines.append(f"storage_backends: {root}")
    file.write_text("\n".join(lines) + "\n")
    env = {k: v for k, v in os.environ.items() if k != "UCM_CONFIG_FILE"}
    command = [sys.executable, "-m", "ucm_core.cli.main", "check", "--file", str(file)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


@pytest.mark.parametrize("pipeline", ["Posix", "Cache|Posix"])
def test_a_block_comes_back_and_nothing_is_left(tmp_path: Path, pipeline: str) -> None:
    root = tmp_path / "kv"
    kept = root / "default" / "something"
    kept.parent.mkdir(parents=True)
    kept.write_text("of a server")
    done = check(tmp_path, pipeline, root)
    assert done.returncode == 0, done.stderr
    assert "a block of 1 MiB came back as it was" in done.stdout
    assert str(root) in done.stdout
    left = [path for path in root.rglob("*") if path.is_file() and path.name != ".ucm-root"]
    assert left == [kept]
    assert not list(root.glob("check-*"))


def test_a_pipeline_that_keeps_nothing(tmp_path: Path) -> None:
    done = check(tmp_path, "Empty", tmp_path)
    assert done.returncode == 1
    assert "stage Empty took a block and does not have it" in done.stderr


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the place of the directory: also root cannot write there."""
    (tmp_path / "file").write_text("")
    done = check(tmp_path, "Posix", tmp_path / "file" / "kv")
    assert done.returncode == 1
    assert str(tmp_path / "file") in done.stderr
    assert "Not a directory" in done.stderr


def test_a_wrong_configuration_is_told_as_ever(tmp_path: Path) -> None:
    done = check(tmp_path, "Posics", tmp_path / "kv")
    assert done.returncode == 1
    assert "Posics" in done.stderr
    assert not (tmp_path / "kv").exists()
