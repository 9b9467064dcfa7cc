"""The co-process ``ucm_limits`` (native/bench): physical limits, one repetition per call."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType

from benchmarks.support.meter import Sample


class Limits:
    """Owns the process; use as a context manager. Not thread-safe."""

    def __init__(self, executable: Path) -> None:
        self._process = subprocess.Popen(
            [str(executable)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.copy_kernel = str(self._ask("info")["copy_kernel"])

    def __enter__(self) -> Limits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)

    def run(self, command: str, **arguments: object) -> Sample:
        """One repetition of ``command``; raises ``RuntimeError`` with the program's own reason."""
        words = [f"{key}={value}" for key, value in arguments.items()]
        answer = self._ask(" ".join([command, *words]))
        return Sample(
            wall_s=float(answer["wall_s"]),
            cpu_s=float(answer["cpu_s"]),
            nbytes=int(answer["bytes"]),
            operations=int(answer["operations"]),
        )

    def _ask(self, line: str) -> dict[str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"ucm_limits ended (code {self._process.wait()}) at: {line}")
        answer: dict[str, str] = json.loads(text)
        if "error" in answer:
            raise RuntimeError(f"ucm_limits: {answer['error']}")
        return answer
