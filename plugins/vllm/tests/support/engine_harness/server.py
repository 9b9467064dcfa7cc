"""`vllm serve` as an operator runs it: one command, HTTP, a process tree of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_harness.client import engine_env, processes_of_session

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """One ``vllm serve`` process tree. `close` ends every process of its session."""

    def __init__(
        self,
        python: str,
        model: str,
        arguments: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.model = model
        self._log = log
        self._python = python
        self._env = engine_env(extra={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **(env or {})})
        command = [python, "-P", "-m", "engine_harness.vllm_cli", "serve", model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                cwd=log.parent,
            )

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def log(self) -> str:
        """What the server has printed so far."""
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Blocks until the server answers; raises with its log when it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"vllm serve ended: {self.log()[-6000:]}")
            with contextlib.suppress(OSError), self._open("/health"):
                return
            time.sleep(0.2)
        raise AssertionError(f"vllm serve is not ready: {self.log()[-6000:]}")

    def wait_exit(self, timeout_s: float) -> int:
        """Exit code of the main process, which must come within ``timeout_s``."""
        return self._process.wait(timeout_s)

    def alive(self) -> list[int]:
        """Processes of the tree that still live."""
        return processes_of_session(self._process.pid)

    def complete(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy completion of token ids, as token ids."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        with self._open("/v1/completions", body) as response:
            answer: dict[str, Any] = json.load(response)
        return list(answer["choices"][0]["token_ids"])

    def bench(self, folder: Path, *arguments: str, timeout_s: float = 180.0) -> dict[str, Any]:
        """``vllm bench serve`` against this server; returns the result that it saves."""
        command = [self._python, "-P", "-m", "engine_harness.vllm_cli", "bench", "serve"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--model", self.model]
        command += ["--disable-tqdm", "--save-result", "--result-dir", str(folder)]
        command += ["--result-filename", "bench.json", *arguments]
        done = subprocess.run(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=folder,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        result: dict[str, Any] = json.loads((folder / "bench.json").read_text())
        return result

    def metrics(self) -> dict[str, float]:
        """``/metrics``, summed over labels."""
        sums: dict[str, float] = {}
        with self._open("/metrics") as response:
            for line in response.read().decode().splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def stop(self) -> int:
        """SIGTERM, as a service manager does; returns the exit code of the main process."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Kill whatever is left of the tree."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            return urllib.request.urlopen(request, timeout=120)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise AssertionError(f"{path}: HTTP {error.code}: {text[:2000]}") from None
