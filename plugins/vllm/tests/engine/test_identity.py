"""B05 on the engine: a fact that changes bytes makes a miss, a fact that does not keeps the hits.

One directory, filled by one process; then each fact is changed alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import MODELS, ModelRecipe, write_model

from engine_cases import (
    CORPUS,
    LOAD_FAILED,
    PREFIX,
    Saved,
    Truth,
    answers,
    checkpoint,
    corpus_job,
    one_by_one,
    ucm,
)
from engine_harness import EngineJob, EnginePool
from engine_harness.tamper import objects

QUESTION = CORPUS[0]


def _other_tensor(directory: Path) -> None:
    """Change one tensor of the last layer in place; names, shapes and the rest stay."""
    path = directory / "model.safetensors"
    data = np.fromfile(path, np.uint8)
    header = int.from_bytes(data[:8].tobytes(), "little")
    import json

    entry = json.loads(data[8 : 8 + header].tobytes())["model.layers.3.self_attn.v_proj.weight"]
    begin, end = (8 + header + offset for offset in entry["data_offsets"])
    values = data[begin:end].view(np.float32)
    data[begin:end] = (values[::-1].copy()).view(np.uint8)
    data.tofile(path)


@dataclass(frozen=True)
class Change:
    """One changed fact: of the checkpoint, or of the engine's arguments."""

    name: str
    recipe: Callable[[ModelRecipe], ModelRecipe] | None = None
    tamper: Callable[[Path], None] | None = None
    engine: dict[str, Any] | None = None


CHANGES_BYTES = [
    Change("one tensor of the weights", tamper=_other_tensor),
    Change("all weights, same name", recipe=lambda r: replace(r, seed=r.seed + 1)),
    Change("rope base", recipe=lambda r: r.with_config(rope_theta=20000.0)),
    Change(
        "rope factor",
        recipe=lambda r: r.with_config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    ),
    Change("norm epsilon", recipe=lambda r: r.with_config(rms_norm_eps=1e-5)),
    Change(
        "rope factor by override",
        engine={
            "hf_overrides": {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
            }
        },
    ),
    Change("kv dtype", engine={"dtype": "bfloat16"}),
]


def _job(model: Path | str, connector: dict[str, Any] | None, engine: Any = None) -> EngineJob:
    return EngineJob(
        str(model),
        one_by_one([QUESTION]),
        connector=connector,
        engine=engine or {},
        name="identity",
    )


@pytest.mark.parametrize("change", CHANGES_BYTES, ids=lambda c: c.name.replace(" ", "-"))
def test_a_fact_that_changes_bytes_is_a_miss(
    change: Change, engines: EnginePool, filled: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    recipe = MODELS["qwen3"]
    write_model(change.recipe(recipe) if change.recipe else recipe, model)
    if change.tamper:
        change.tamper(model)
    before = {path: path.stat().st_mtime_ns for path in objects(filled)}
    jobs = [_job(model, ucm(filled), change.engine), _job(model, None, change.engine)]
    changed, plain = [result.require_ok() for result in engines.run_all(jobs)]
    assert changed.external_hits() == 0
    assert changed.prometheus.get(LOAD_FAILED, 0) == 0
    assert answers(changed) == answers(plain)
    assert {path: path.stat().st_mtime_ns for path in before} == before, (
        "old objects are left alone"
    )
    assert len(objects(filled)) == 2 * len(before)


def test_same_path_and_name_with_other_weights_is_a_miss_in_the_next_process(
    engines: EnginePool, kv_dir: Path, tmp_path: Path
) -> None:
    """What a deployment does that copies a new checkpoint over the old one."""
    model = tmp_path / "model"
    write_model(MODELS["qwen3"], model)
    job = _job(model, ucm(kv_dir), {"served_model_name": "production"})
    assert engines.run(job).require_ok().external_hits() == 0
    assert engines.run(job).require_ok().external_hits() == PREFIX
    _other_tensor(model)
    swapped = engines.run(job).require_ok()
    assert swapped.external_hits() == 0
    job.connector = None
    assert answers(swapped) == answers(engines.run(job).require_ok())


def test_path_and_served_name_do_not_matter(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "moved" / "checkpoint"
    shutil.copytree(checkpoint("qwen3"), elsewhere)
    engine = {"served_model_name": "another-name", "max_model_len": 768, "max_num_seqs": 3}
    result = engines.run(_job(elsewhere, ucm(filled), engine)).require_ok()
    assert result.external_hits() == PREFIX
    assert answers(result) == [truth("qwen3").cold[0]]


def test_another_stored_block_size_in_a_named_namespace_is_refused_with_both_values(
    engines: EnginePool, kv_dir: Path
) -> None:
    first = _job(checkpoint("qwen3"), ucm(kv_dir, namespace="shared", block_tokens=64))
    assert engines.run(first).require_ok()
    second = _job(checkpoint("qwen3"), ucm(kv_dir, namespace="shared", block_tokens=128))
    refused = engines.run(second)
    assert refused.exit_code == 1
    assert "64" in refused.error
    assert "128" in refused.error
    assert "block_tokens" in refused.error


def test_a_model_never_reads_what_another_model_saved(
    engines: EnginePool,
    saved: Callable[[str], Saved],
    truth: Callable[[str], Truth],
    tmp_path: Path,
) -> None:
    """Two models with equal shapes and prompts in one directory."""
    directory = tmp_path / "kv"
    shutil.copytree(saved("qwen3").directory, directory)
    llama = engines.run(corpus_job("llama", connector=ucm(directory))).require_ok()
    assert llama.external_hits(0) == 0
    assert answers(llama) == truth("llama").cold


def test_a_fresh_interpreter_with_another_hash_seed_hits(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    """B01 on the engine, and the engine core as a process of its own."""
    job = _job(checkpoint("qwen3"), ucm(filled))
    job.env = {"PYTHONHASHSEED": "4242"}
    job.timeout_s = 240.0
    result = engines.start_fresh(job).wait().require_ok()
    assert result.external_hits() == PREFIX
    assert answers(result) == [truth("qwen3").cold[0]]
