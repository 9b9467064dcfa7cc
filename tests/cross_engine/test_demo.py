"""`make demo-cross` as an operator runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine_harness import EnginePool

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_table_of_hits(vllm: EnginePool, sglang: EnginePool) -> None:
    """The pools are asked for only to skip, with the reason, where an engine is not built."""
    del vllm, sglang
    command = [sys.executable, "-P", str(ROOT / "examples" / "cross_demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("identical") == 4
    assert done.stdout.count("320") == 4
