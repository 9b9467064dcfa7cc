"""The core imports alone, and names no engine."""

from __future__ import annotations

import subprocess
import sys

ENGINES = ("torch", "vllm", "sglang", "tensorrt_llm")


def test_core_imports_no_engine() -> None:
    code = (
        "import sys, ucm_core, ucm_core.hookspecs, ucm_core.registry\n"
        f"print([name for name in {ENGINES} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
