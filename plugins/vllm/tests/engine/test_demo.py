"""`make demo`, with shorter prompts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from engine_harness.client import engine_env

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


@pytest.mark.timeout(300)
def test_the_demo_reuses_and_answers_the_same(engine_python: str, tmp_path: Path) -> None:
    command = [engine_python, "-P", str(EXAMPLES / "demo.py"), "--dir", str(tmp_path / "demo")]
    command += ["--prefix", "256", "--requests", "2"]
    done = subprocess.run(
        command, env=engine_env(), capture_output=True, text=True, timeout=280, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outputs identical: yes" in done.stdout
    # Both prompts of the second process, and the second prompt of the first one, start from 256 tokens.
    reused = re.search(r"tokens reused by the second process \(.*\): (\d+) of", done.stdout)
    assert reused is not None
    assert int(reused[1]) == 2 * 256
    files = [path for path in (tmp_path / "demo" / "kv").rglob("*") if path.is_file()]
    assert len(files) > 256 // 64
