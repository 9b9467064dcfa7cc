"""Starting: with nothing that persists, read-only directories, configuration files."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_cases import CORPUS, PREFIX, UNRELATED, Truth, checkpoint, ucm
from engine_harness import EngineJob, EnginePool, Round
from engine_harness.tamper import objects


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
