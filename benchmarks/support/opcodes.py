"""Counts executed Python opcodes: shows whether a call runs Python per block.

A wall-clock profile samples; this one counts. The number of bytecode instructions that a call
executes in our packages is exact and does not depend on the machine: if it is the same for 64 and
for 4096 blocks, nothing on that path is Python per block. Vectorised numpy and native calls count as
one instruction, which is the point.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

PACKAGES = ("ucm_core", "ucm_vllm", "ucm_backend_posix")


def count_opcodes(call: Callable[[], object], packages: tuple[str, ...] = PACKAGES) -> int:
    """Opcodes executed on this thread inside ``packages`` while ``call`` runs."""
    count = 0

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        module = frame.f_globals.get("__name__", "")
        if not any(module == p or module.startswith(p + ".") for p in packages):
            return None
        frame.f_trace_opcodes = True

        def step(inner: FrameType, kind: str, value: object) -> Any:
            nonlocal count
            count += kind == "opcode"
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
