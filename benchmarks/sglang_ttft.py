"""Time to first token in the real SGLang: computed, from its own caches, from storage, from another engine.

One process per row; every prompt is asked alone, the engine's own caches emptied before (but for the row
that shows them). The last row is served from what vLLM saved.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.machine import describe, load_average
from benchmarks.support.report import Report, Table, Target

ROOT = Path(__file__).resolve().parents[1]
for _path in ("examples", "plugins/vllm/tests/support", "plugins/sglang/tests/support"):
    sys.path.insert(0, str(ROOT / _path))

from cross_demo import pools  # noqa: E402
from tiny_models import ensure_model  # noqa: E402

from engine_harness import EngineJob, EnginePool, EngineResult, Round, prompt  # noqa: E402
from sglang_cases import PAGE, ucm  # noqa: E402

MODEL = "demo"
#: Whole pages and one token more.
TOKENS = 47 * PAGE + 1
LIMITS = {"max_total_tokens": 8192, "hicache_ratio": 2.0}


def jobs(
    directory: Path, prompts: list[list[int]]
) -> dict[str, tuple[EngineJob | None, EngineJob]]:
    """Row -> the job that fills its storage (None: nothing to fill), and the one that is measured."""
    pages = len(prompts) * (TOKENS // PAGE)
    cold = [Round([tokens], max_tokens=1, reset_local=True) for tokens in prompts]
    own = [
        r for tokens in prompts for r in (Round([tokens], 1, reset_local=True), Round([tokens], 1))
    ]
    saved = {"root": str(directory / "ucm"), "count": pages}
    store = ucm(directory / "ucm", namespace="bench")
    filed = {
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(
            {"prefetch_threshold": 64, "file_storage_path": str(directory / "file")}
        ),
    }
    (directory / "file").mkdir()
    files = {"root": str(directory / "file"), "count": pages, "pattern": "*.bin"}
    return {
        "computed": (None, _job(cold)),
        "own device cache": (None, _job(own, connector=store | {"namespace": "own"})),
        "file storage": (
            _job(cold, engine=filed, scenario="sglang_engine:settle", scenario_args=files),
            _job(cold, engine=filed),
        ),
        "UCM storage": (
            _job(cold, connector=store, scenario="sglang_engine:settle", scenario_args=saved),
            _job(cold, connector=store),
        ),
    }


def _job(rounds: list[Round], engine: dict[str, Any] | None = None, **changes: Any) -> EngineJob:
    job = EngineJob(str(ensure_model(MODEL)), rounds, timeout_s=300.0, name="ttft")
    job.engine = {**LIMITS, **(engine or {})}
    if engine is None and "connector" not in changes:
        del job.engine["hicache_ratio"]
    for name, value in changes.items():
        setattr(job, name, value)
    return job


def times(result: EngineResult, stored: int | None) -> list[float]:
    """Seconds per prompt. Raises when the storage did not serve what the row is about."""
    outputs = [o for outputs in result.outputs for o in outputs]
    if stored is None:  # every prompt twice: the second from the engine's own cache
        return [o.ttft_s for o in outputs if o.cached and not o.stored]
    if any(o.stored != stored for o in outputs):
        raise RuntimeError(f"stored tokens: {[o.stored for o in outputs]}, expected {stored} each")
    return [o.ttft_s for o in outputs]


def run(report: Report, directory: Path, count: int) -> None:
    prompts = [prompt(1000 + i, TOKENS) for i in range(count)]
    rows: dict[str, float] = {}
    whole = TOKENS // PAGE * PAGE
    vllm, sglang = pools()
    with vllm, sglang:
        for row, (fill, measured) in jobs(directory, prompts).items():
            if fill is not None:
                sglang.run(fill).require_ok()
            expected = {"computed": 0, "own device cache": None}.get(row, whole)
            rows[row] = median(times(sglang.run(measured).require_ok(), expected))
        rows["UCM, saved by vLLM"] = median(times(_cross(vllm, sglang, directory, prompts), whole))
    table = [[row, f"{1e3 * s:.0f}", f"{rows['computed'] / s:.1f}"] for row, s in rows.items()]
    note = f"{MODEL} model, {TOKENS} tokens a prompt, {count} prompts, medians."
    report.table(Table("SGLang: time to first token", ("served", "ms", "speed-up"), table, note))
    ratio = rows["UCM, saved by vLLM"] / rows["UCM storage"]
    report.target(Target("TTFT of a cross-engine hit / own storage hit", "at most", 1.35, ratio))


def _cross(
    vllm: EnginePool, sglang: EnginePool, directory: Path, prompts: list[list[int]]
) -> EngineResult:
    from engine_cases import ucm as vllm_ucm

    fill = EngineJob(str(ensure_model(MODEL)), [Round([t], 1) for t in prompts], timeout_s=300.0)
    fill.engine = {"max_model_len": 4096, "kv_cache_memory_bytes": 384 << 20, "block_size": 64}
    fill.connector = vllm_ucm(directory / "cross", {}, namespace="bench")
    fill.scenario = "engine_scenarios:leftovers"
    vllm.run(fill).require_ok()
    rounds = [Round([tokens], max_tokens=1, reset_local=True) for tokens in prompts]
    served = _job(rounds, connector=ucm(directory / "cross", namespace="bench"))
    return sglang.run(served).require_ok()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_ttft", description=__doc__)
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=ROOT / "build/bench-data")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    for what, value in describe(options.directory, ("ucm-core", "numpy")):
        print(f"{what:20s} {value}")
    print(f"{'load average':20s} {load_average():.2f}")
    report = Report()
    scratch = Path(tempfile.mkdtemp(prefix="ttft-", dir=options.directory))
    try:
        run(report, scratch, options.prompts)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(report.targets_table().text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
