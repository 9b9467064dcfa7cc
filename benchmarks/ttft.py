"""Time to first token in real vLLM: recompute, vLLM's own prefix cache, UCM and the peers.

Runs in the engine's environment: ``python -m benchmarks.ttft --directory D --out F``. Two phases,
both in rounds in which every contestant is asked once:

1. *first pass*: every round brings a prefix nobody has seen; contestants that save, save it. The
   plain engine beside them shows what saving costs, and what recomputing costs.
2. *reuse*: the same prefixes with other last tokens, in several passes. In each pass contestants
   that read files are **new** processes, and files leave the page cache before every request.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.support.engines import (
    PREFIX_TOKENS,
    SUFFIX_TOKENS,
    Engine,
    EngineSpec,
    Reply,
    import_engine,
    number_formats,
)
from benchmarks.support.model import VOCAB

#: Host memory each contestant may use: holds the prefixes of all rounds.
HOST_BYTES = 1 << 30
#: Length of the prompt that warms a new engine: saved in the first phase, loaded in the second.
WARM_TOKENS = 512
WARM_PREFIX = 10_000

Rows = dict[str, list[dict[str, object]]]
Step = Callable[[int], None]


def prompt(prefix: int, suffix: int, length: int = PREFIX_TOKENS) -> list[int]:
    """Tokens of shared part number ``prefix`` followed by new part number ``suffix``."""
    tokens: list[int] = []
    for seed, count in ((f"prefix {prefix}", length), (f"suffix {suffix}", SUFFIX_TOKENS)):
        source = random.Random(seed)
        tokens += [source.randrange(3, VOCAB) for _ in range(count)]
    return tokens


def connector(name: str, **extra: object) -> dict[str, object]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def contestants(directory: Path, with_ucm: bool) -> dict[str, EngineSpec]:
    """Every engine by name. Those named ``... files`` keep what they save below ``directory``."""
    module = "benchmarks.support.cpu_offload"
    host = {"spec_module_path": module, "cpu_bytes_to_use": HOST_BYTES}
    tiers = [{"type": "fs", "root_dir": str(directory / "offloading")}]
    example = connector("ExampleConnector", shared_storage_path=str(directory / "example"))
    specs = [
        EngineSpec("plain"),
        EngineSpec(
            "OffloadingConnector host",
            connector("OffloadingConnector", spec_name="CpuCopySpec", **host),
        ),
        EngineSpec(
            "OffloadingConnector files",
            connector(
                "OffloadingConnector",
                spec_name="CpuCopyTieringSpec",
                secondary_tiers=tiers,
                **host,
            ),
        ),
        EngineSpec("ExampleConnector files", example),
    ]
    if with_ucm:
        specs.append(EngineSpec("UCM files", ucm_connector(directory / "ucm")))
    return {spec.name: spec for spec in specs}


def ucm_connector(directory: Path) -> dict[str, object]:
    """UCM as an operator would set it for this comparison: default pipeline, own directory."""
    store = {
        "store_pipeline": "Cache|Posix",
        "storage_backends": str(directory),
        "cache_buffer_capacity_gb": HOST_BYTES / 2**30,
    }
    entry = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": store}
    return connector("UCMConnector", ucm_connectors=[entry])


def drop_from_page_cache(directory: Path) -> None:
    """Write back and drop every file below ``directory``."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def record(rows: Rows, name: str, reply: Reply, **more: object) -> None:
    row = {
        "wall_s": reply.sample.wall_s,
        "cpu_s": reply.sample.cpu_s,
        "cached": reply.cached_tokens,
        "first": reply.tokens[0],
        **more,
    }
    rows.setdefault(name, []).append(row)


class Bench:
    """Both phases. Engines stay alive between rounds; ``close`` ends those that are."""

    def __init__(
        self, directory: Path, rounds: int, passes: int, specs: dict[str, EngineSpec]
    ) -> None:
        self.directory = directory
        self.rounds = rounds
        self.passes = passes
        self.specs = specs
        self.engines: dict[str, Engine] = {}
        self.model = directory.parent / "model-llama-82m"
        self.rows: dict[str, Rows] = {"first pass": {}, "reuse": {}}
        self._pass = 0

    def start(self, name: str) -> None:
        """Start an engine; a shorter prompt pays for what is set up lazily."""
        engine = self.engines[name] = Engine(self.specs[name], self.model, self.directory)
        engine.ask(prompt(WARM_PREFIX, WARM_PREFIX, WARM_TOKENS))
        engine.settle()
        drop_from_page_cache(self.directory)
        engine.forget()
        engine.ask(prompt(WARM_PREFIX, WARM_PREFIX + 1, WARM_TOKENS))
        engine.settle()

    def first_pass(self) -> None:
        """New prefixes; ``settle_cpu_s`` is what saving costs after the first token."""
        names = list(self.specs)
        for name in names:
            self.start(name)
        for index in range(self.rounds):
            for name in _rotated(names, index):
                reply = self.engines[name].ask(prompt(index, index))
                settled = self.engines[name].settle()
                record(self.rows["first pass"], name, reply, settle_cpu_s=settled)

    def reuse(self) -> None:
        """The same prefixes again: from vLLM's own cache, from host memory, from files."""
        files = [name for name in self.specs if name.endswith(" files")]
        for index in range(self.passes):
            self._pass = index
            for name in files:
                self.engines.pop(name).close()
            for name in files:
                self.start(name)
            for prefix in range(self.rounds):
                for step in _rotated(self._steps(), index + prefix):
                    step(prefix)

    def python(self) -> dict[str, list[int]]:
        """Instructions of UCM's Python per served request, short and long, several requests each."""
        engine = self.engines.get("UCM files")
        if engine is None:
            return {}
        counts: dict[str, list[int]] = {}
        for length, prefix in ((WARM_TOKENS, WARM_PREFIX), (PREFIX_TOKENS, 0)):
            for index in range(5):
                engine.forget()
                count = engine.count(prompt(prefix, 30_000 + index, length))
                counts.setdefault(str(length), []).append(count)
                engine.settle()
        return counts

    def _steps(self) -> list[Step]:
        def local(prefix: int) -> None:
            self._again("plain", "own prefix cache", prefix)

        def host(prefix: int) -> None:
            self.engines["OffloadingConnector host"].forget()
            self._again("OffloadingConnector host", "OffloadingConnector, host tier", prefix)

        def cold(name: str, row: str) -> Step:
            def step(prefix: int) -> None:
                self.engines[name].forget()
                drop_from_page_cache(self.directory)
                self._again(name, row, prefix)
                self.engines[name].settle()

            return step

        def hot(prefix: int) -> None:
            self.engines["UCM files"].forget()
            self._again("UCM files", "UCM, host cache", prefix)

        def ucm(prefix: int) -> None:
            cold("UCM files", "UCM, files")(prefix)
            hot(prefix)

        steps = {
            "plain": local,
            "OffloadingConnector host": host,
            "OffloadingConnector files": cold(
                "OffloadingConnector files", "OffloadingConnector, file tier"
            ),
            "ExampleConnector files": cold("ExampleConnector files", "ExampleConnector, files"),
            "UCM files": ucm,
        }
        return [steps[name] for name in self.engines]

    def _again(self, engine: str, row: str, prefix: int) -> None:
        # The new part of the prompt is new in every pass, and the same for all contestants: what
        # they answer must be the same too.
        reply = self.engines[engine].ask(prompt(prefix, 20_000 + 100 * self._pass + prefix))
        record(self.rows["reuse"], row, reply)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def _rotated(items: list, by: int) -> list:  # type: ignore[type-arg]
    by %= len(items)
    return items[by:] + items[:by]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--without-ucm", action="store_true")
    parser.add_argument("--peer", action="append", help="only these beside the plain engine")
    options = parser.parse_args()
    directory = options.directory.resolve() / "ttft"
    shutil.rmtree(directory, ignore_errors=True)
    for name in ("offloading", "example", "ucm"):
        (directory / name).mkdir(parents=True)
    specs = contestants(directory, not options.without_ucm)
    if options.peer:  # while working on one of them
        specs = {name: spec for name, spec in specs.items() if name in ("plain", *options.peer)}
    bench = Bench(directory, options.rounds, options.passes, specs)
    # In a process of its own: this one forks, so it must not have computed with torch.
    subprocess.run([sys.executable, "-m", "benchmarks.support.model", bench.model], check=True)
    import_engine()
    try:
        bench.first_pass()
        bench.reuse()
        python = bench.python()
    finally:
        bench.close()
    results = {**bench.rows, "formats": number_formats(), "python": python}
    options.out.write_text(json.dumps(results))
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
