"""Wrong configurations: all problems at once, each with key, place, expected and got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ucm_core.errors import ConfigError

from .conftest import Loading, connector


def test_all_problems_at_once(loading: Loading, tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text(
        "persist_token_treshold: 5\n"
        "block_tokens: many\n"
        "ucm_connectors:\n"
        "  - ucm_connector_name: UcmPipelineStore\n"
        "    ucm_connector_config:\n"
        "      store_pipeline: Posix\n"
        "      storage_backends: /data\n"
        "      io_drect: true\n"
        "      posix_io_engine: uring\n"
        "      timeout_ms: 0\n"
        "      use_gdr: true\n"
    )
    problems = loading.problems({"UCM_CONFIG_FILE": str(path)})
    expected = [
        (f"persist_token_treshold ({path}:1)", "did you mean 'persist_token_threshold'"),
        (f"io_drect ({path}:8)", "unknown key (did you mean 'io_direct'?)"),
        (f"use_gdr ({path}:11)", "not built yet"),
        (f"block_tokens ({path}:2)", "valid integer"),
        (f"timeout_ms ({path}:10)", "greater than 0"),
        (f"posix_io_engine ({path}:9)", "got 'uring'"),
    ]
    assert len(problems) == len(expected), problems
    for start, piece in expected:
        assert [p for p in problems if p.startswith(start) and piece in p], (start, problems)


@pytest.mark.parametrize(
    ("inline", "pieces"),
    [
        ({"blok_tokens": 64}, ["blok_tokens (inline): unknown key (did you mean 'block_tokens'?)"]),
        ({"block_tokens": 0}, ["block_tokens (inline)", "greater than 0", "got 0"]),
        ({"namespace": "a/b"}, ["namespace (inline)", "got 'a/b'"]),
        ({"use_layerwise": "load"}, ["use_layerwise", "'auto' or 'save'", "got 'load'"]),
        ({"retention_interval": 0}, ["retention_interval (inline)", "greater than 0", "got 0"]),
        ({"retention_budget_gb": "1 parsec"}, ["retention_budget_gb (inline)", "unknown unit"]),
        ({"retention_rule": "defualt"}, ["retention_rule (inline)", "unknown retention"]),
        ({"layerwise_look_ahead": 0}, ["layerwise_look_ahead (inline)", "greater than 0"]),
        ({"enable_record_traces": True}, ["enable_record_traces (inline)", "not built"]),
        ({"ucm_sparse_config": {}}, ["ucm_sparse_config", "no part of UCM"]),
        ({"ucm_connectors": []}, ["exactly one"]),
        ({"ucm_connectors": [{}, {}]}, ["exactly one", "'Cache|Posix'"]),
        ({"ucm_connectors": [{"ucm_connector_nam": "x"}]}, ["did you mean 'ucm_connector_name'"]),
        (
            {"ucm_connectors": [{"ucm_connector_name": "UcmPipelinStore"}]},
            ["unknown connector", "did you mean 'UcmPipelineStore'"],
        ),
        ({"ucm_connectors": [{"ucm_connector_name": "UcmDramStore"}]}, ["ucm-backend-dram"]),
        (connector("Posx"), ["unknown pipeline 'Posx' (did you mean 'Posix'?)", "known"]),
        (connector("YuanRong|Posix"), ["vendor"]),
        (connector("Cache|Ds3fs"), ["mounted directory"]),
        (connector("Mooncake"), ["ucm-backend-mooncake"]),
        (connector(7), ["expected a name, got 7"]),
        (connector(block_tokens=64), ["block_tokens", "top level, beside ucm_connectors"]),
        (connector(storage_backends="data"), ["storage_backends", "relative"]),
        (connector(storage_backends="/a:/a"), ["the same directory twice"]),
        (connector(storage_backends="/a::/b"), ["empty directory name"]),
        (connector(posix_io_engine="aio", io_direct=False), ["needs io_direct"]),
        (connector("Cache|Posix", cache_buffer_capacity_gb="4 lumps"), ["unknown unit"]),
        (connector("Cache|Posix", health={"failure_treshold": 1}), ["'failure_threshold'"]),
        (connector("Cache|Posix", health={"failure_threshold": 0}), ["health.failure_threshold"]),
        (connector("Posix", store_health={"intervall_ms": 1}), ["'interval_ms'"]),
        (connector("Posix", store_health={"failures": 9}), ["store_health", "set failures to"]),
        (connector("Posix", store_health={"window": 0}), ["store_health.window"]),
        (connector("Posix", store_health=False), ["store_health", "got False"]),
    ],
)
def test_problem(loading: Loading, inline: dict[str, Any], pieces: list[str]) -> None:
    problems = loading.problems(inline)
    assert [p for p in problems if all(piece in p for piece in pieces)], problems


def test_values_that_mean_off_are_accepted_for_what_is_not_built(loading: Loading) -> None:
    assert loading.load(connector(use_gdr=False)).warnings == ()


def test_direct_transfers_are_refused_with_what_is_done_instead(loading: Loading) -> None:
    (problem,) = loading.problems(connector(use_gdr=True))
    assert "pinned host buffers" in problem
    assert "remove it or set False" in problem


def test_health_and_event_options_are_typed_values(loading: Loading) -> None:
    config = loading.load(
        {**connector(store_health={"interval_ms": "2 s"}), "enable_event_sync": False}
    )
    assert config.store.store_health.interval_ms == 2_000
    assert config.store.store_health.failures == 2
    assert config.core.enable_event_sync is False
    assert loading.load(connector(store_health={"enabled": False})).store.store_health.window == 8


def test_directories_are_required_with_an_explicit_store(loading: Loading) -> None:
    given = connector("Posix")
    del given["ucm_connectors"][0]["ucm_connector_config"]["storage_backends"]
    (problem,) = loading.problems(given)
    assert "storage_backends: required" in problem


def test_pipeline_is_required_with_an_explicit_store(loading: Loading) -> None:
    given = connector("Posix")
    del given["ucm_connectors"][0]["ucm_connector_config"]["store_pipeline"]
    assert "store_pipeline: required" in loading.problems(given)[0]


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("a: [1, 2", "not YAML"),
        ("- a\n- b\n", "expected keys and values"),
        ("block_tokens: 64\nblock_tokens: 32\n", ":2: 'block_tokens' was already given in line 1"),
        ("a: !!python/object:os.system x", "not YAML"),
    ],
)
def test_bad_file(loading: Loading, tmp_path: Path, text: str, piece: str) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        loading.load({"UCM_CONFIG_FILE": str(path)})
    assert piece in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_names_path_and_who_asked(loading: Loading) -> None:
    with pytest.raises(ConfigError, match=r"cannot read /no/such.yaml .*TRTLLM_UCM_CONFIG_FILE"):
        loading.load(None, TRTLLM_UCM_CONFIG_FILE="/no/such.yaml")
