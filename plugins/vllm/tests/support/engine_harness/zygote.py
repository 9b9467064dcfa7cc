"""The warm process: imports the engine once and forks a child per job.

Protocol on a UNIX socket, one connection per job, JSON lines. Client: ``{"job", "result", "log",
"timeout_s"}`` (paths and seconds). Zygote: ``{"pid"}`` at once, ``{"exit_code", "timed_out"}`` at
the end. Closing the connection early kills the job. The zygote stays single-threaded (it forks), and
ends, with every job, when its standard input closes: that is when the test process is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Between asking a hung job for its stacks and killing it.
STACK_DUMP_S = 1.0


@dataclass
class _Job:
    pid: int
    pidfd: int
    connection: socket.socket
    deadline: float
    asked_for_stacks: bool = False
    timed_out: bool = False


def _engine() -> Any:
    """The module that runs jobs: vLLM's, or what ``$UCM_HARNESS_ENGINE`` names."""
    return importlib.import_module(os.environ.get("UCM_HARNESS_ENGINE", "engine_harness.engine"))


def _warm_up() -> None:
    """Everything a job will import; no thread may exist afterwards."""
    _engine().warm_up()
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        raise RuntimeError(f"the imports started {tasks - 1} threads: forking is not safe")


def _child(request: dict[str, Any]) -> int:
    """Runs in the forked child: becomes a session of its own, then runs the job."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    from engine_harness.engine import write_result
    from engine_harness.job import EngineJob

    job = EngineJob.from_json(json.loads(Path(request["job"]).read_text()))
    os.environ.update(job.env)
    result = _engine().run_job(job)
    write_result(result, Path(request["result"]))
    return 1 if result.error else 0


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class Zygote:
    """The event loop: new connections, ended children, deadlines."""

    def __init__(self, socket_path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(socket_path)
        self._listener.listen(16)
        self._jobs: dict[int, _Job] = {}

    def serve(self) -> None:
        """Returns when standard input closes; every job has been killed by then."""
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(sys.stdin, selectors.EVENT_READ, "stdin")
        while True:
            for key, _ in self._selector.select(timeout=0.2):
                if key.data == "stdin":
                    if not os.read(0, 1024):
                        self._close()
                        return
                elif key.data == "listener":
                    self._start()
                else:
                    self._event(key.data, key.fileobj)
            self._enforce_deadlines()

    def _start(self) -> None:
        connection, _ = self._listener.accept()
        with connection.makefile("rb") as stream:
            request = json.loads(stream.readline())
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                self._forget()
                code = _child(request)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        job = _Job(
            pid, os.pidfd_open(pid), connection, time.monotonic() + float(request["timeout_s"])
        )
        self._jobs[pid] = job
        self._selector.register(job.pidfd, selectors.EVENT_READ, pid)
        self._selector.register(connection, selectors.EVENT_READ, pid)
        _send(connection, {"pid": pid})

    def _forget(self) -> None:
        """In a child: drop what belongs to the zygote and to other jobs."""
        self._selector.close()
        self._listener.close()
        for job in self._jobs.values():
            job.connection.close()
            os.close(job.pidfd)

    def _event(self, pid: int, source: Any) -> None:
        job = self._jobs.get(pid)
        if job is None:
            return
        if source == job.pidfd:
            self._finish(job)
        else:  # the client never sends twice: readable means closed
            self._selector.unregister(job.connection)
            _kill_group(pid, signal.SIGKILL)

    def _finish(self, job: _Job) -> None:
        _, status = os.waitpid(job.pid, 0)
        _kill_group(job.pid, signal.SIGKILL)  # whatever the job left behind
        self._selector.unregister(job.pidfd)
        os.close(job.pidfd)
        with contextlib.suppress(KeyError):
            self._selector.unregister(job.connection)
        code = os.waitstatus_to_exitcode(status)
        _send(job.connection, {"exit_code": code, "timed_out": job.timed_out})
        job.connection.close()
        del self._jobs[job.pid]

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for job in self._jobs.values():
            if now < job.deadline:
                continue
            if not job.asked_for_stacks:
                job.asked_for_stacks = True
                job.deadline = now + STACK_DUMP_S
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGUSR1)
            elif not job.timed_out:
                job.timed_out = True
                _kill_group(job.pid, signal.SIGKILL)

    def _close(self) -> None:
        for job in list(self._jobs.values()):
            _kill_group(job.pid, signal.SIGKILL)
            self._finish(job)
        self._listener.close()


def main() -> int:
    """``python -m engine_harness.zygote SOCKET``; says ``ready`` on its first standard output."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what imports print belongs to the log
    zygote = Zygote(sys.argv[1])
    _warm_up()
    os.write(answer, b"ready\n")
    os.close(answer)
    zygote.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
