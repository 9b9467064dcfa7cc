"""`vllm serve` with one option and nothing else, and with a configuration that is refused."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_cases import CORPUS, Truth, checkpoint
from engine_harness.server import VllmServer
from engine_harness.tamper import objects
from tiny_tokenizer import write_tokenizer

#: Two cold starts of a whole server.
pytestmark = pytest.mark.timeout(700)

ROOT = Path(__file__).resolve().parents[4]


def documented_options(page: str) -> list[str]:
    """What the page's `vllm serve MODEL ...` says after the model, as a shell reads it."""
    found = re.search(r"^vllm serve MODEL ((?:.*\\\n)*.*)$", (ROOT / page).read_text(), re.M)
    assert found is not None, f"{page} shows no vllm serve"
    return shlex.split(found[1].replace("\\\n", " "))


SERVE = ["--enforce-eager", "--dtype", "float32"]
SERVE += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)]
BENCH = ["--dataset-name", "random", "--num-prompts", "4", "--max-concurrency", "1", "--seed", "3"]
BENCH += ["--random-prefix-len", "300", "--random-input-len", "20", "--random-output-len", "8"]
EXTERNAL = "vllm:external_prefix_cache_hits_total"
#: The shared prefix in whole blocks of 128, vLLM's own choice on the CPU.
WHOLE = 256


def _all_gone(server: VllmServer, within_s: float = 15.0) -> bool:
    """Every process of the server's tree has ended, soon after its first one did."""
    deadline = time.monotonic() + within_s
    while server.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    return server.alive() == []


def test_one_option_a_restart_and_vllms_own_benchmark(
    engine_python: str, tmp_path: Path, truth: Callable[[str], Truth]
) -> None:
    """Two servers one after the other, started as the pages say; `vllm bench serve` sends both the same
    random prompts."""
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    options = [documented_options(page) for page in ("README.md", "docs/operator-vllm.md")]
    assert documented_options("plugins/vllm/README.md") == options[0]
    model = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3"), model)
    write_tokenizer(model, 1024)
    hits = []
    for start, option in zip(("first", "second"), options, strict=True):
        arguments = [*SERVE, *option]
        folder = tmp_path / start
        folder.mkdir()
        log = folder / "serve.log"
        with VllmServer(engine_python, str(model), arguments, log, env) as server:
            server.wait_ready()
            for index in (0, 1):
                assert server.complete(CORPUS[index], 12) == truth("qwen3").cold[index]
            hits.append(server.metrics()[EXTERNAL])
            result = server.bench(folder, *BENCH)
            assert (result["completed"], result["failed"]) == (4, 0)
            metrics = server.metrics()
            hits.append(metrics[EXTERNAL] - hits[-1])
            assert metrics["ucm:ucm_hit_tokens_total"] == metrics[EXTERNAL]
            assert server.stop() == 0
            assert _all_gone(server)
    # The first request of each kind loads the shared prefix; vLLM itself has it for the others.
    assert hits[:3] == [0, 0, WHOLE]
    assert hits[3] >= WHOLE, "the benchmark's prompts were found by the second server"
    assert objects(tmp_path / "cache" / "ucm" / "kv")


def test_a_refused_configuration_ends_the_whole_process_tree(
    engine_python: str, tmp_path: Path
) -> None:
    """B25: the reason is in the last lines, the exit code is not 0, nothing lives on."""
    kv = (
        '{"kv_connector":"UCMConnector","kv_role":"kv_both","kv_connector_extra_config":'
        '{"ucm_connectors":[{"ucm_connector_name":"UcmPipelineStore","ucm_connector_config":'
        f'{{"store_pipeline":"Posix","storage_backends":"{tmp_path}/kv",'
        '"posix_capacity_gb":-5,"storage_backend":"x"}}]}}'
    )
    arguments = [*SERVE, "--skip-tokenizer-init", "--kv-transfer-config", kv]
    log = tmp_path / "serve.log"
    with VllmServer(engine_python, checkpoint("qwen3"), arguments, log) as server:
        code = server.wait_exit(180)
        assert _all_gone(server)
        assert code != 0
        # vLLM's front end prints two tracebacks of its own after the one that names the reason.
        last = "\n".join(server.log().splitlines()[-160:])
    assert "posix_capacity_gb" in last
    assert "storage_backend" in last, "every problem is listed at once"
    assert not (tmp_path / "kv").exists(), "a refused start leaves nothing behind"
