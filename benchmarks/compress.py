"""Compression of real KV: ratio, speed and CPU of what the Compress stage does, beside a copy and plain zstd.

The KV is what vLLM saved through UCM (pipeline ``Posix``) in a run of this benchmark, or whatever files
lie below a directory: ``python -m benchmarks.compress --kv DIRECTORY`` (one namespace of a Posix store).
The model has random weights, so its KV is close to noise in all but sign and exponent: read the ratio as
a lower bound, and measure the files of a real model with ``--kv``.
"""

from __future__ import annotations

import argparse
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.limits import Limits
from benchmarks.support.meter import Sample, Series, interleave
from benchmarks.support.report import Report, Table

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, TOKENS = 4, 1024
#: Enough to be out of the caches, little enough to be measured often.
MAX_BYTES = 64 << 20
MAGIC = b"UCMFILE\n"
CODECS = (("zstd", 1), ("zstd", -3), ("zstd", 3), ("lz4", 1))


@dataclass(frozen=True, slots=True)
class Kv:
    """Shards of stored blocks, one behind the other in the file ``path``."""

    path: Path
    shard_bytes: int
    shards: int
    layout: str

    @property
    def element_bytes(self) -> int:
        dtype = self.layout.partition("|")[0]
        return {"fp32": 4, "fp8": 1}.get(dtype.partition("_")[0], 2)


def run(report: Report, limits: Limits, scratch: Path, rounds: int) -> None:
    """Save KV with vLLM, then measure it."""
    code = subprocess.run(
        [sys.executable, "-m", "benchmarks.compress", "--save", str(scratch / "kv")], cwd=ROOT
    ).returncode
    if code != 0:
        report.skip("compression of KV", f"saving KV with vLLM ended with code {code}")
        return
    measure(report, limits, gather(scratch / "kv", scratch / "shards"), rounds)


def save(directory: Path) -> None:
    """Run vLLM with UCM in bf16 over a few prompts; its files stay below ``directory``."""
    from benchmarks.support import engines
    from benchmarks.support.model import VOCAB

    engines.import_engine()
    # Whatever this CPU multiplies quickly: bf16 is what servers keep.
    engines.number_formats = lambda: {"dtype": "bfloat16", "kv_cache_dtype": "auto"}
    directory.mkdir(parents=True)
    model = directory.parent / "model"
    subprocess.run([sys.executable, "-m", "benchmarks.support.model", model], cwd=ROOT, check=True)
    store = {"store_pipeline": "Posix", "storage_backends": str(directory)}
    entry = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": store}
    kv = {
        "kv_connector": "UCMConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ucm_connectors": [entry]},
    }
    engine = engines.Engine(engines.EngineSpec("save", kv), model, directory)
    try:
        for number in range(PROMPTS):
            source = random.Random(number)
            engine.ask([source.randrange(3, VOCAB) for _ in range(TOKENS)], 2)
        engine.settle()
    finally:
        engine.close()


def objects(directory: Path) -> Iterator[Path]:
    """Stored blocks below ``directory``."""
    for path in sorted(directory.rglob("*")):
        if len(path.name) == 32 and path.is_file():
            yield path


def gather(directory: Path, out: Path) -> Kv:
    """Write the shards of the blocks below ``directory`` to ``out``; blocks of one shape only."""
    kv: Kv | None = None
    with out.open("wb") as file:
        for path in objects(directory):
            data = path.read_bytes()
            version, header, _, shard_bytes, count, text = struct.unpack_from("<IIQQII", data, 8)
            if data[:8] != MAGIC or version != 1:
                continue
            layout = data[128 + 8 * count :][:text].decode()
            found = Kv(out, shard_bytes, count, layout)
            kv = kv or found
            if (found.shard_bytes, found.layout) != (kv.shard_bytes, kv.layout):
                continue
            stride = -(-shard_bytes // 4096) * 4096
            for shard in range(count):
                if file.tell() + shard_bytes <= MAX_BYTES:
                    file.write(data[header + shard * stride :][:shard_bytes])
        total = file.tell()
    if kv is None:
        raise SystemExit(f"{directory}: no stored blocks (files of 32 hex digits) below it")
    return Kv(out, kv.shard_bytes, total // kv.shard_bytes, kv.layout)


def measure(report: Report, limits: Limits, kv: Kv, rounds: int) -> None:
    """One thread of each contestant, in turns, over the same shards."""

    def step(how: str, codec: str = "zstd", level: int = 1) -> Sample:
        return limits.run(
            "pack_shards",
            path=kv.path,
            shard_bytes=kv.shard_bytes,
            how=how,
            codec=codec,
            level=level,
            width=kv.element_bytes,
        )

    pairs: list[tuple[str, Series, Series]] = []
    for codec, level in CODECS:
        series = interleave(
            {
                "pack": lambda c=codec, n=level: step("pack", c, n),  # type: ignore[misc]
                "unpack": lambda c=codec, n=level: step("unpack", c, n),  # type: ignore[misc]
            },
            rounds=rounds,
        )
        pairs.append((f"Compress, {codec} {level}", series["pack"], series["unpack"]))
    series = interleave(
        {
            "pack": lambda: step("zstd"),
            "unpack": lambda: step("unzstd"),
            "copy": lambda: step("copy"),
        },
        rounds=rounds,
    )
    pairs.append(("zstd 1 over the bytes as they lie", series["pack"], series["unpack"]))
    pairs.append(("memcpy", series["copy"], series["copy"]))
    rows = [
        [
            name,
            f"{pack.samples[0].nbytes / pack.samples[0].operations:.3f}",
            f"{pack.gb_per_s:.2f}",
            f"{pack.cpu_s_per_gb:.2f}",
            f"{unpack.gb_per_s:.2f}",
            f"{unpack.cpu_s_per_gb:.2f}",
            f"{100 * max(pack.spread, unpack.spread):.0f} %",
        ]
        for name, pack, unpack in pairs
    ]
    total = kv.shards * kv.shard_bytes
    report.table(
        Table(
            "Compression of KV",
            ("what", "ratio", "pack GB/s", "CPU-s/GB", "unpack GB/s", "CPU-s/GB", "spread"),
            rows,
            f"{kv.shards} shards of {kv.shard_bytes} bytes ({total / 1e6:.0f} MB, `{kv.layout}`) that "
            "vLLM saved; one thread, GB of KV. The model's weights are random, so its mantissas are "
            "noise and the ratio is a lower bound of what a trained model gives.",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compress", description=__doc__)
    parser.add_argument("--save", type=Path, help="only save KV of vLLM below this directory")
    parser.add_argument("--kv", type=Path, help="measure the blocks below this directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limits", type=Path, default=ROOT / "build/dev/native/ucm_limits")
    options = parser.parse_args()
    if options.save:
        return save(options.save)
    if not options.kv:
        parser.error("name a directory with --kv, or run `python -m benchmarks --only compress`")
    shards = ROOT / "build/compress-shards"
    try:
        with Limits(options.limits) as limits:
            measure(Report(), limits, gather(options.kv, shards), options.rounds)
    finally:
        shards.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
