"""What a real engine saved, TensorRT-LLM's adapter gives to the stub's pool, element by element; and what it
saves from there, the real engine serves, with the tokens of its own run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import stub_interface
from engine_cases import checkpoint
from engine_harness import EnginePool
from engine_pairs import Engine, Pair, answers, hits
from sglang_cases import PAGE, PREFIX, TAIL, prompt
from stub_filled import FilledExecutor, first_layer
from stub_manager import StubRequest
from stub_memory import Shape

TOKENS = prompt(6, PREFIX + TAIL)
PAGES = PREFIX // PAGE

Build = Callable[[str, Path, bool], FilledExecutor]


def config_of(model: str) -> dict[str, int]:
    found: dict[str, int] = json.loads((Path(checkpoint(model)) / "config.json").read_text())
    return found


def shape_of(model: str) -> Shape:
    """Pages of 32 tokens, as the engine has them by default."""
    config = config_of(model)
    latent = bool(config.get("kv_lora_rank"))
    size = config["kv_lora_rank"] + config["qk_rope_head_dim"] if latent else config["head_dim"]
    return Shape(
        layers=config["num_hidden_layers"],
        heads=1 if latent else config["num_key_value_heads"],
        head_size=size,
        latent=latent,
        page_tokens=32,
        pages=64,
        dtype="bfloat16" if latent else "float32",
    )


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Builds a stub over a directory, with one pool or layer groups; all are closed at the end."""
    made: list[FilledExecutor] = []

    def build(model: str, directory: Path, v2: bool) -> FilledExecutor:
        store = {
            "store_pipeline": "Posix",
            "storage_backends": str(directory),
            "staging_buffer_gb": "64 MiB",
        }
        connector = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": store}
        top = {
            "ucm_connectors": [connector],
            "promise_buffer_gb": "64 MiB",
            "promise_wait_ms": 10_000,
        }
        file = tmp_path / "ucm.yaml"
        file.write_text(yaml.safe_dump(top))
        monkeypatch.setenv("UCM_CONFIG_FILE", str(file))
        shape = shape_of(model)
        args = SimpleNamespace(
            model=checkpoint(model),
            dtype=shape.dtype,
            max_seq_len=4096,
            kv_cache_config=SimpleNamespace(enable_partial_reuse=False, dtype="auto"),
        )
        home = sys.modules[stub_interface.NEW_HOME]
        made.append(FilledExecutor(module, home, args, shape, v2=v2, local_reuse=False))
        return made[-1]

    with stub_interface.installed(True) as module:
        yield build
        for executor in made:
            executor.close()


def start(executor: FilledExecutor, request: StubRequest) -> None:
    """Until the request has computed its prompt: its pages are still its own."""
    executor.add(request)
    for _ in range(200):
        executor.step()
        if request.state == "generation":
            return
    raise AssertionError(request.state)


@pytest.mark.parametrize(
    ("engine", "model", "v2"),
    [("vllm", "llama", False), ("sglang", "llama", True), ("vllm", "deepseek_v3", False)],
)
def test_there_and_back(
    vllm: EnginePool,
    sglang: EnginePool,
    stub: Build,
    tmp_path: Path,
    engine: Engine,
    model: str,
    v2: bool,
) -> None:
    pair = Pair(vllm, sglang, model=model)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    saved = pair.run(engine, [TOKENS], theirs, stored=PAGES)
    assert hits(saved) == [0]

    first = stub(model, theirs, v2)
    request = StubRequest(1, TOKENS, max_new=50)
    start(first, request)
    assert request.matched == [(0, PREFIX)]
    values = first.read(request, PREFIX)
    if model == "llama":
        wanted = first_layer(Path(checkpoint(model)), config_of(model), TOKENS[:PREFIX])
        np.testing.assert_allclose(values[0], wanted, rtol=1e-3, atol=1e-4)

    # The same bytes, saved by the stub's own adapter into an empty directory.
    second = stub(model, ours, v2)
    second.values = values
    again = StubRequest(2, TOKENS[:PREFIX] + [5], max_new=2)
    second.run(again)
    assert again.matched == [(0, 0)]
    second.close()
    served = pair.run(engine, [TOKENS], ours)
    assert hits(served) == [PREFIX]
    if model == "llama":  # fp32: computed and loaded agree to the token
        assert answers(served) == answers(saved)
    else:  # bf16: a hit agrees with a hit at the same place
        assert answers(served) == answers(pair.run(engine, [TOKENS], theirs))
