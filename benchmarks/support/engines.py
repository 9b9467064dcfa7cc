"""Real vLLM engines, one process each, forked from one warm import and driven in turns.

Importing vLLM costs ten seconds and more; an engine process forked afterwards starts in a few. The
engines of a comparison are alive at the same time and asked one after the other, so that noise of
the machine hits all of them; an engine that is not asked is blocked on its pipe and costs nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection as connection
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.meter import Sample, cpu_seconds
from benchmarks.support.opcodes import count_opcodes

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine in the process that we meter
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",  # a second compute thread mostly spins at barriers on two cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

#: Tokens of one prompt: the shared part and the part that is new in every request.
PREFIX_TOKENS, SUFFIX_TOKENS = 3072, 20
ENGINE_BLOCK = 32
#: An engine that does not answer within this is killed and fails the run.
ANSWER_LIMIT_S = 120.0
KV_BYTES = 384 << 20  # holds the prefixes of all rounds


def number_formats() -> dict[str, str]:
    """bf16 where the CPU multiplies it quickly, else fp32 (bf16 would be ten times slower).

    The KV cache has the model's type: vLLM on the CPU miscomputes with another one.
    """
    flags = Path("/proc/cpuinfo").read_text().split()
    quick = "avx512f" in flags or "amx_bf16" in flags
    return {"dtype": "bfloat16" if quick else "float32", "kv_cache_dtype": "auto"}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One contestant: a label and its connector configuration."""

    name: str
    kv: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answered request: its cost, the tokens vLLM did not have to compute, what came out."""

    sample: Sample
    cached_tokens: int
    tokens: list[int]


def import_engine() -> None:
    """Import what every engine needs, in the parent, before the first fork.

    The parent must not compute with torch: a fork does not take the threads of its pool along.
    """
    os.environ.update(ENVIRONMENT)
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401


class Engine:
    """Handle of one forked engine process. Not thread-safe; ``close`` ends the process."""

    def __init__(self, spec: EngineSpec, model: Path, log_dir: Path) -> None:
        self.spec = spec
        self._log = log_dir / f"{spec.name.replace(' ', '_')}.log"
        self._pipe, theirs = connection.Pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._pipe.close()
            _serve(theirs, spec, model, self._log)
        theirs.close()
        self._receive()

    def ask(self, prompt: list[int], new_tokens: int = 1) -> Reply:
        """Generate ``new_tokens`` greedily; with one, the wall time is the TTFT."""
        reply = self._call("ask", prompt, new_tokens)
        assert isinstance(reply, Reply)
        return reply

    def count(self, prompt: list[int]) -> int:
        """Python instructions executed in our packages by the engine's thread for one request."""
        return int(self._call("count", prompt))

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, not what the connector keeps."""
        self._call("forget")

    def settle(self) -> float:
        """Let deferred saves finish (bounded); CPU seconds that this took."""
        return float(self._call("settle"))

    def close(self) -> None:
        """End the engine in order and wait for its process."""
        if self._pid:
            try:
                self._call("close")
            finally:
                self._pipe.close()
                os.waitpid(self._pid, 0)
                self._pid = 0

    def _call(self, *message: object) -> Any:
        self._pipe.send(message)
        return self._receive()

    def _receive(self) -> Any:
        try:
            if not self._pipe.poll(ANSWER_LIMIT_S):
                os.kill(self._pid, signal.SIGKILL)
                raise RuntimeError(f"engine '{self.spec.name}': silent for {ANSWER_LIMIT_S} s")
            answer = self._pipe.recv()
        except EOFError:
            answer = RuntimeError("the engine process ended")
        if isinstance(answer, Exception):
            raise RuntimeError(f"engine '{self.spec.name}': {answer} (log: {self._log})")
        return answer


def _serve(pipe: Any, spec: EngineSpec, model: Path, log: Path) -> None:
    """Body of the forked process; never returns."""
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(spec.environment)
        server = _Server(spec, model)
        pipe.send("ready")
        while True:
            name, *arguments = pipe.recv()
            pipe.send(getattr(server, name)(*arguments))
            if name == "close":
                break
        code = 0
    except (EOFError, KeyboardInterrupt):
        pass
    except BaseException as error:  # reported to the parent, which names the log
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(RuntimeError(f"{type(error).__name__}: {str(error)[:400]}"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Server:
    """Owns the vLLM engine inside the forked process."""

    def __init__(self, spec: EngineSpec, model: Path) -> None:
        from vllm import LLM

        longest = PREFIX_TOKENS + SUFFIX_TOKENS + 64
        options: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "max_model_len": longest,
            "max_num_batched_tokens": longest,
            "max_num_seqs": 4,
            "enforce_eager": True,
            "kv_cache_memory_bytes": KV_BYTES,
            "block_size": ENGINE_BLOCK,
            "seed": 0,
            **number_formats(),
        }
        if spec.kv is not None:
            options["kv_transfer_config"] = spec.kv
        self._llm = LLM(**options)

    def ask(self, prompt: list[int], new_tokens: int) -> Reply:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        cpu, wall = cpu_seconds(), time.perf_counter()
        output = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        sample = Sample(time.perf_counter() - wall, cpu_seconds() - cpu)
        return Reply(sample, output.num_cached_tokens or 0, list(output.outputs[0].token_ids))

    def count(self, prompt: list[int]) -> int:
        return count_opcodes(lambda: self.ask(prompt, 1))

    def forget(self) -> bool:
        for _ in range(50):  # blocks whose save is under way cannot be dropped yet
            if self._llm.reset_prefix_cache():
                return True
            self.settle()
        raise RuntimeError("reset_prefix_cache refuses for five seconds: blocks are still held")

    def settle(self) -> float:
        """Connectors learn of finished saves in engine steps only: a short request gives some."""
        before = cpu_seconds()
        self.ask([3 + time.time_ns() % 4000 for _ in range(8)], 4)
        quiet, last = 0, cpu_seconds()
        for _ in range(60):  # at most 3 s
            time.sleep(0.05)
            now = cpu_seconds()
            quiet = quiet + 1 if now - last < 0.001 else 0
            last = now
            if quiet == 2:
                break
        return cpu_seconds() - before

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
