"""`make demo`: one vLLM process answers and ends; a second one reuses its KV cache from UCM's files.

Three real engine processes run the same prompts, which share a long prefix: one without UCM (the
reference), one that fills an empty UCM directory, and a new one that finds it filled. The table shows
time to first token and the tokens that vLLM says it took from the connector. The exit code is 0 only
if prompts were served from the files and all outputs are identical.

The model has random weights (40 M parameters, generated on first use, nothing is downloaded) and runs
in fp32, where equal means equal. vLLM is imported once; every engine is a process forked from there.
vLLM's own prefix cache is off in all three runs, so that each prompt shows UCM alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_models import ensure_model

#: Settings of a quiet, offline engine on a small machine. What the user has set wins.
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
ENGINE_TIMEOUT_S = 300.0
ANSWER_TOKENS = 16
FRESH_TOKENS = 24
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"


@dataclass
class Answer:
    """One prompt in one process."""

    tokens: list[int]
    reused: int
    ttft_s: float


@dataclass
class Run:
    """What one engine process reports."""

    pid: int = 0
    answers: list[Answer] = field(default_factory=list)
    external_hits: int = 0
    error: str = ""


def prompts(requests: int, prefix: int) -> list[list[int]]:
    """``requests`` prompts of random tokens with a common prefix and a fresh tail each."""
    stream = random.Random(2026)

    def draw(count: int) -> list[int]:
        return [stream.randrange(3, 4000) for _ in range(count)]

    shared = draw(prefix)
    return [shared + draw(FRESH_TOKENS) for _ in range(requests)]


def connector(directory: Path) -> dict[str, Any]:
    """What an operator passes as ``--kv-transfer-config``; only the directory is set explicitly."""
    return {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "ucm_connectors": [
                {
                    "ucm_connector_name": "UcmPipelineStore",
                    "ucm_connector_config": {
                        "store_pipeline": "Posix",
                        "storage_backends": str(directory),
                    },
                }
            ]
        },
    }


def serve(model: Path, questions: list[list[int]], kv: dict[str, Any] | None) -> Run:
    """Build an engine in this process, answer one prompt after the other, shut it down."""
    from vllm import LLM, SamplingParams

    longest = max(map(len, questions)) + ANSWER_TOKENS
    options: dict[str, Any] = {} if kv is None else {"kv_transfer_config": kv}
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=4,
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )

    def ask(question: list[int], tokens: int) -> Any:
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        return llm.generate([{"prompt_token_ids": question}], params, use_tqdm=False)[0]

    ask([5] * 40, 2)  # first-use costs of the kernels are nobody's time to first token
    run = Run(pid=os.getpid())
    for question in questions:
        out = ask(question, ANSWER_TOKENS)
        run.answers.append(
            Answer(
                list(out.outputs[0].token_ids),
                out.num_cached_tokens or 0,
                out.metrics.first_token_latency,
            )
        )
    run.external_hits = sum(int(m.value) for m in llm.get_metrics() if m.name == EXTERNAL_HITS)
    llm.llm_engine.engine_core.shutdown()
    return run


def in_new_process(log: Path, model: Path, questions: list[list[int]], kv: Any) -> Run:
    """Fork an engine process of its own session, wait for its report, bounded in time."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(reader)
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            run = serve(model, questions, kv)
        except BaseException as error:
            traceback.print_exc()
            run = Run(error=f"{type(error).__name__}: {error}")
        with os.fdopen(writer, "w") as out:
            json.dump(asdict(run), out)
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + ENGINE_TIMEOUT_S
    report = b""
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        report += piece
    else:
        os.killpg(pid, signal.SIGKILL)
    os.close(reader)
    os.waitpid(pid, 0)
    if not report:
        return Run(error=f"no answer within {ENGINE_TIMEOUT_S:.0f} s")
    data = json.loads(report)
    return Run(**{**data, "answers": [Answer(**a) for a in data["answers"]]})


def table(questions: list[list[int]], runs: list[Run], identical: list[bool]) -> Table:
    """One line per prompt: three times to first token, tokens reused, identity of the outputs."""
    plain, first, second = runs
    result = Table(title="Time to first token, and prompt tokens reused from UCM")
    for heading in ("prompt", "without UCM", "1st process", "reused"):
        result.add_column(heading, justify="right")
    for heading in ("2nd process", "reused", "speed-up"):
        result.add_column(heading, justify="right", style="bold")
    result.add_column("outputs")
    for i, question in enumerate(questions):
        a, b, c = plain.answers[i], first.answers[i], second.answers[i]
        result.add_row(
            f"{len(question)} tokens",
            f"{a.ttft_s * 1e3:.0f} ms",
            f"{b.ttft_s * 1e3:.0f} ms",
            str(b.reused),
            f"{c.ttft_s * 1e3:.0f} ms",
            str(c.reused),
            f"{a.ttft_s / c.ttft_s:.1f}x",
            "identical" if identical[i] else "[red]differ[/red]",
        )
    return result


def demonstrate(console: Console, directory: Path, requests: int, prefix: int) -> int:
    """Run the three processes, print the table, return the exit code."""
    with console.status("writing the model"):
        model = ensure_model("demo")
    with console.status("importing vLLM"):
        import vllm.entrypoints.llm
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker  # noqa: F401
    files = directory / "kv"
    files.mkdir(parents=True)
    questions = prompts(requests, prefix)
    steps: list[tuple[str, dict[str, Any] | None]] = [
        ("reference: a vLLM process without UCM", None),
        ("first process: fills an empty UCM directory", connector(files)),
        ("second process: finds it filled", connector(files)),
    ]
    runs: list[Run] = []
    for number, (title, kv) in enumerate(steps):
        log = directory / f"engine-{number}.log"
        started = time.monotonic()
        with console.status(title):
            run = in_new_process(log, model, questions, kv)
        if run.error:
            console.print(f"[red]{title}: {run.error}[/red]\n--- end of its log ---")
            console.print(log.read_text(errors="replace")[-4000:], markup=False, highlight=False)
            return 1
        console.print(f"{title} (pid {run.pid}, {time.monotonic() - started:.1f} s)")
        runs.append(run)
    saved = [path for path in files.rglob("*") if path.is_file()]
    identical = [
        len({tuple(run.answers[i].tokens) for run in runs}) == 1 for i in range(len(questions))
    ]
    hits = runs[2].external_hits
    console.print(table(questions, runs, identical))
    console.print(
        f"tokens reused by the second process ({EXTERNAL_HITS}): {hits}"
        f" of {sum(map(len, questions))} prompt tokens"
    )
    size = sum(path.stat().st_size for path in saved)
    console.print(f"UCM's directory: {len(saved)} files, {size / 1e6:.0f} MB")
    console.print(f"outputs identical: {'yes' if all(identical) else 'NO'}")
    if hits == 0:
        console.print("[red]the second process reused nothing[/red]")
    return 0 if all(identical) and hits > 0 else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Save KV in one vLLM process, reuse it in another."
    )
    parser.add_argument("--dir", type=Path, help="keep files and logs here (default: removed)")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens that prompts share")
    parser.add_argument("--requests", type=int, default=3)
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    directory = options.dir or Path(tempfile.mkdtemp(prefix="ucm-demo-"))
    if options.dir and directory.exists() and any(directory.iterdir()):
        parser.error(f"--dir {directory} is not empty: the first process must start cold")
    try:
        return demonstrate(Console(width=100), directory, options.requests, options.prefix)
    finally:
        if options.dir is None:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
