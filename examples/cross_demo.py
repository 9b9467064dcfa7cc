"""`make demo-cross`: what vLLM saved SGLang serves, and what SGLang saved vLLM serves.

Two engines, each in an environment of its own, and one cache directory. First vLLM computes a prompt and
SGLang computes another; then each of them gets both, in a new process. The table shows how many tokens of
each prompt came from the directory, by the engine's own count, and whether the answer is the one that
the engine gives without a cache. The exit code is 0 only if every prompt was served and every answer is
right. Models have random weights and run in fp32, where equal means equal.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
for _path in ("examples", "plugins/vllm/tests/support", "plugins/sglang/tests/support"):
    sys.path.insert(0, str(ROOT / _path))

from engine_harness import EnginePool, EngineResult  # noqa: E402
from engine_pairs import Engine, Pair, answers, hits  # noqa: E402
from sglang_cases import PAGE, PREFIX, TAIL, prompt  # noqa: E402

ENGINES: tuple[Engine, ...] = ("vllm", "sglang")


def pools() -> tuple[EnginePool, EnginePool]:
    """vLLM's and SGLang's warm processes."""
    sglang = {"UCM_HARNESS_ENGINE": "sglang_engine", "SGLANG_USE_CPU_ENGINE": "1"}
    paths = [ROOT / "plugins/sglang/tests/support", ROOT / "examples"]
    return (
        EnginePool(str(ROOT / ".venv-vllm/bin/python"), [ROOT / "examples"]),
        EnginePool(str(ROOT / ".venv-sglang/bin/python"), paths, sglang),
    )


def show(console: Console, directory: Path) -> bool:
    """Run the engines and print the table; True when every prompt was served with the right answer."""
    prompts = {engine: prompt(seed, PREFIX + TAIL) for seed, engine in enumerate(ENGINES, 1)}
    both = list(prompts.values())
    table = Table("engine", "prompt", "saved by", "tokens", "from the directory", "answer")
    good = True
    vllm, sglang = pools()
    with vllm, sglang:
        pair = Pair(vllm, sglang)
        alone = {engine: timed(console, pair, engine, both) for engine in ENGINES}
        for number, engine in enumerate(ENGINES, 1):
            stored = number * PREFIX // PAGE
            timed(console, pair, engine, [prompts[engine]], directory, stored=stored)
        for engine in ENGINES:
            served = timed(console, pair, engine, both, directory)
            for number, writer in enumerate(ENGINES):
                right = answers(served)[number] == answers(alone[engine])[number]
                found = hits(served)[number]
                good &= right and found == PREFIX
                answer = "identical" if right else "[red]different[/red]"
                tokens = str(len(both[number]))
                table.add_row(engine, str(number + 1), writer, tokens, str(found), answer)
    console.print(table)
    return good


def timed(
    console: Console,
    pair: Pair,
    engine: Engine,
    prompts: list[list[int]],
    directory: Path | None = None,
    stored: int = 0,
) -> EngineResult:
    """One engine process, with a line that says what it did."""
    started = time.monotonic()
    result = pair.run(engine, prompts, directory, stored=stored)
    what = "without a cache" if directory is None else ("saves" if stored else "serves")
    console.print(
        f"{engine}: {len(prompts)} prompt(s), {what} ({time.monotonic() - started:.1f} s)"
    )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keep", type=Path, help="an empty directory that stays behind")
    options = parser.parse_args()
    directory = options.keep or Path(tempfile.mkdtemp(prefix="ucm-cross-"))
    try:
        return 0 if show(Console(), directory) else 1
    finally:
        if options.keep is None:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
