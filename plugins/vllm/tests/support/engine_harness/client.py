"""What tests use. Importing this needs neither vLLM nor torch; the pool starts what has them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_harness.job import EngineJob, EngineResult

#: One warm import takes 13-20 s alone and some minutes on a machine busy with other tests.
START_TIMEOUT_S = 300.0

BASE_ENV: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A second thread mostly spins at barriers on a small shared machine.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_SUPPORT = Path(__file__).resolve().parent.parent


def engine_env(
    paths: Sequence[Path] = (), extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of an engine process; ``paths`` are importable there."""
    env = {**os.environ, **BASE_ENV, **(extra or {})}
    parts = [str(_SUPPORT), *map(str, paths), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(p for p in parts if p)
    return env


def processes_of_session(session: int) -> list[int]:
    """Live (not zombie) processes whose session is ``session``, found in /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


class EngineHandle:
    """A job under way. `wait` may be called once; `kill` ends its whole process group."""

    def __init__(self, folder: Path, started: float, timeout_s: float) -> None:
        self.folder = folder
        self.pid = 0
        self._started = started
        self._timeout_s = timeout_s

    def wait(self) -> EngineResult:
        """Blocks until the process has ended (its deadline bounds that) and collects its result."""
        code, timed_out = self._wait_exit()
        path = self.folder / "result.json"
        result = EngineResult(pid=self.pid)
        if path.is_file():
            result = EngineResult.from_json(json.loads(path.read_text()))
        result.exit_code, result.timed_out = code, timed_out
        result.wall_s = time.monotonic() - self._started
        result.log = (self.folder / "log.txt").read_text(errors="replace")
        return result

    def log(self) -> str:
        """What the process has printed so far."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal every process of the job's group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _wait_exit(self) -> tuple[int | None, bool]:
        raise NotImplementedError


class _ForkedHandle(EngineHandle):
    def __init__(self, folder: Path, connection: socket.socket, timeout_s: float) -> None:
        super().__init__(folder, time.monotonic(), timeout_s)
        self._connection = connection
        # The zygote enforces the deadline; this bound only catches a dead zygote.
        connection.settimeout(timeout_s + 30.0)
        self._stream = connection.makefile("rb")
        self.pid = int(self._receive()["pid"])

    def _receive(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            raise RuntimeError("the warm engine process is gone")
        message: dict[str, Any] = json.loads(line)
        return message

    def _wait_exit(self) -> tuple[int | None, bool]:
        try:
            message = self._receive()
        finally:
            self._stream.close()
            self._connection.close()
        return int(message["exit_code"]), bool(message["timed_out"])


class _FreshHandle(EngineHandle):
    def __init__(self, folder: Path, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        super().__init__(folder, time.monotonic(), timeout_s)
        self._process = process
        self.pid = process.pid

    def _wait_exit(self) -> tuple[int | None, bool]:
        try:
            return self._process.wait(self._timeout_s), False
        except subprocess.TimeoutExpired:
            return None, True
        finally:
            if self._process.poll() is None:
                self.kill()
                self._process.wait(30)


class EnginePool:
    """Starts engines: forked from one warm process, or each in a fresh interpreter.

    ``python`` has vLLM; ``paths`` are put on its PYTHONPATH (scenarios, connectors under test).
    Not thread-safe; several jobs may run at once through `start`.
    """

    def __init__(
        self,
        python: str | None = None,
        paths: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._python = python or sys.executable
        self._env = engine_env(paths, env)
        self._folder = Path(tempfile.mkdtemp(prefix="ucm-engines-"))
        self._socket = str(self._folder / "zygote.sock")
        self._zygote: subprocess.Popen[bytes] | None = None
        self._jobs = 0

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, job: EngineJob) -> EngineResult:
        """One engine process from start to end."""
        return self.start(job).wait()

    def run_all(self, jobs: Sequence[EngineJob]) -> list[EngineResult]:
        """Independent engines at the same time, a few; results in the order of the jobs."""
        return [handle.wait() for handle in [self.start(job) for job in jobs]]

    def start(self, job: EngineJob) -> EngineHandle:
        """Fork an engine off the warm process (started on first use)."""
        self._ensure_zygote()
        folder = self._new_folder(job)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(START_TIMEOUT_S)
        connection.connect(self._socket)
        request = {
            "job": str(folder / "job.json"),
            "result": str(folder / "result.json"),
            "log": str(folder / "log.txt"),
            "timeout_s": job.timeout_s,
        }
        connection.sendall(json.dumps(request).encode() + b"\n")
        return _ForkedHandle(folder, connection, job.timeout_s)

    def start_fresh(self, job: EngineJob) -> EngineHandle:
        """Start an engine in a new interpreter and session, with vLLM's own process tree."""
        folder = self._new_folder(job)
        command = [self._python, "-m", "engine_harness.engine"]
        command += [str(folder / "job.json"), str(folder / "result.json")]
        env = {**self._env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **job.env}
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=folder,
            )
        return _FreshHandle(folder, process, job.timeout_s)

    def close(self) -> None:
        """End the warm process and every job of it; remove their files."""
        if self._zygote is not None:
            assert self._zygote.stdin is not None and self._zygote.stdout is not None
            self._zygote.stdin.close()
            try:
                self._zygote.wait(20)
            except subprocess.TimeoutExpired:
                self._zygote.kill()
                self._zygote.wait(20)
            self._zygote.stdout.close()
            self._zygote = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _new_folder(self, job: EngineJob) -> Path:
        self._jobs += 1
        folder = self._folder / f"{self._jobs:03d}-{job.name}"
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps(job.to_json()))
        (folder / "log.txt").touch()
        return folder

    def _ensure_zygote(self) -> None:
        if self._zygote is not None and self._zygote.poll() is None:
            return
        Path(self._socket).unlink(missing_ok=True)
        log_path = self._folder / "zygote.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [self._python, "-m", "engine_harness.zygote", self._socket],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if ready else b""
        if line != b"ready\n":
            process.stdin.close()
            process.kill()
            process.wait()
            process.stdout.close()
            raise RuntimeError(
                f"the warm engine process did not start (said {line!r})\n"
                + log_path.read_text(errors="replace")[-4000:]
            )
        self._zygote = process
