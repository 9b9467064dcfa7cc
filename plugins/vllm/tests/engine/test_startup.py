"""Starting: with one option and nothing else, with nothing that persists, and with what is refused."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_cases import CORPUS, PREFIX, UNRELATED, Truth, checkpoint, ucm
from engine_harness import EngineJob, EnginePool, Round
from engine_harness.server import VllmServer
from engine_harness.tamper import objects

ONE_OPTION = '{"kv_connector":"UCMConnector","kv_role":"kv_both"}'
SERVE = ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
SERVE += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)]


def test_vllm_serve_with_one_option_hits_after_a_restart(
    engine_python: str, tmp_path: Path, truth: Callable[[str], Truth]
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    arguments = [*SERVE, "--kv-transfer-config", ONE_OPTION]
    hits = []
    for start in ("first", "second"):
        log = tmp_path / f"{start}.log"
        with VllmServer(engine_python, checkpoint("qwen3"), arguments, log, env) as server:
            server.wait_ready()
            for index in (0, 1):
                assert server.complete(CORPUS[index], 12) == truth("qwen3").cold[index]
            metrics = server.metrics()
            hits.append(metrics["vllm:external_prefix_cache_hits_total"])
            assert "ucm:ucm_hit_tokens_total" in metrics
            assert server.stop() == 0
            assert _all_gone(server)
    assert hits[0] < PREFIX
    assert hits[1] >= PREFIX
    assert objects(tmp_path / "cache" / "ucm" / "kv")


def _all_gone(server: VllmServer, within_s: float = 15.0) -> bool:
    """Every process of the server's tree has ended, soon after its first one did."""
    deadline = time.monotonic() + within_s
    while server.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    return server.alive() == []


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
    arguments = [*SERVE, "--kv-transfer-config", kv]
    log = tmp_path / "serve.log"
    with VllmServer(engine_python, checkpoint("qwen3"), arguments, log) as server:
        code = server.wait_exit(180)
        assert _all_gone(server)
        assert code != 0
        # vLLM's front end prints two tracebacks of its own after the one that names the reason.
        last = "\n".join(server.log().splitlines()[-160:])
    assert "posix_capacity_gb" in last
    assert "storage_backend" in last, "every problem is listed at once"


def _sent_twice(connector: dict[str, object]) -> EngineJob:
    ask = Round([UNRELATED], max_tokens=4, reset_local=True)
    return EngineJob(checkpoint("qwen3"), [ask, ask], connector=connector)


def test_a_pipeline_that_keeps_nothing_says_so(engines: EnginePool, kv_dir: Path) -> None:
    """B40: the operator learns at start why no file will ever appear."""
    connector = ucm(kv_dir)
    store = connector["kv_connector_extra_config"]["ucm_connectors"][0]["ucm_connector_config"]
    store["store_pipeline"] = "Empty"
    del store["storage_backends"]
    result = engines.run(_sent_twice(connector)).require_ok()
    warnings = [line for line in result.log.splitlines() if "WARNING" in line and "Empty" in line]
    assert warnings, result.log[-3000:]
    assert result.external_hits(1) == 0
    assert objects(kv_dir) == []


def test_a_read_only_directory_says_so(engines: EnginePool, small_disk: Path) -> None:
    """B40: either refused with path and errno, or served without saving after a warning."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    result = engines.run(_sent_twice(ucm(small_disk)))
    text = result.error + result.log
    assert str(small_disk) in text
    assert "Read-only file system" in text
    if result.ok:
        assert result.external_hits(1) == 0


def test_a_connector_that_only_consumes_saves_nothing(
    engines: EnginePool, filled: Path, truth: Callable[[str], Truth]
) -> None:
    connector = ucm(filled)
    connector["kv_role"] = "kv_consumer"
    before = len(objects(filled))
    job = EngineJob(checkpoint("qwen3"), [Round([CORPUS[0]], max_tokens=12), Round([UNRELATED])])
    job.connector = connector
    result = engines.run(job).require_ok()
    assert result.external_hits(0) == PREFIX
    assert result.tokens(0) == [truth("qwen3").cold[0]]
    assert len(objects(filled)) == before


@pytest.mark.parametrize("where", ["inline", "environment"])
def test_a_configuration_file_is_honoured(
    where: str, engines: EnginePool, filled: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ucm.yaml"
    file.write_text(
        "ucm_connectors:\n"
        "  - ucm_connector_name: UcmPipelineStore\n"
        "    ucm_connector_config:\n"
        "      store_pipeline: Posix\n"
        f"      storage_backends: {filled}\n"
    )
    job = EngineJob(checkpoint("qwen3"), [Round([CORPUS[0]], max_tokens=12)])
    job.connector = {"kv_connector": "UCMConnector", "kv_role": "kv_both"}
    if where == "inline":
        job.connector["kv_connector_extra_config"] = {"UCM_CONFIG_FILE": str(file)}
    else:
        job.env = {"UCM_CONFIG_FILE": str(file)}
    assert engines.run(job).require_ok().external_hits() == PREFIX
