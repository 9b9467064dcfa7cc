"""What is refused at start, with which words; what is warned about; versions and constructor forms."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
)

from scripted_engine import ScriptedConnector, World, kv_cache_config, vllm_config
from ucm_core.errors import ConfigError, UnsupportedError
from ucm_vllm import register, startup, versions
from ucm_vllm.connector import UCMConnector
from ucm_vllm.facts import read_facts

FULL = {"block_size": 32, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float32}


@pytest.fixture
def configs(world: World) -> tuple[Any, Any]:
    config = vllm_config(world)
    return config, kv_cache_config(config, 16)


def _groups(kv: Any, *specs: Any) -> Any:
    names = kv.kv_cache_groups[0].layer_names
    return replace(kv, kv_cache_groups=[KVCacheGroupSpec(names, spec) for spec in specs])


class UnheardOfSpec(FullAttentionSpec):
    """A kind of a later vLLM."""


MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([MAMBA], "recurrent states"),
        ([SinkFullAttentionSpec(**FULL, sink_len=4)], "sink blocks"),
        ([UnheardOfSpec(**FULL)], "unknown KV cache spec UnheardOfSpec"),
        ([FullAttentionSpec(**FULL, attention_chunk_size=64)], "attention_chunk_size=64"),
        ([FullAttentionSpec(**FULL, non_causal=True)], "non-causal"),
        ([FullAttentionSpec(**FULL, tokens_per_state=4)], "compressed"),
    ],
)
def test_kinds_that_are_not_supported_are_named(configs, specs: list[Any], words: str) -> None:
    config, kv = configs
    with pytest.raises(UnsupportedError, match=words):
        read_facts(config, _groups(kv, *specs))


def test_every_reason_is_listed_at_once(configs) -> None:
    config, kv = configs
    config.cache_config.calculate_kv_scales = True
    config.speculative_config = SimpleNamespace(method="eagle")
    config.device_config.device_type = "xpu"
    with pytest.raises(UnsupportedError) as refused:
        read_facts(config, _groups(kv, MAMBA))
    for words in ("calculate_kv_scales", "'eagle'", "is on xpu", "recurrent states"):
        assert words in str(refused.value)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_layouts_that_scatter_heads_are_refused(world: World, configs, order: str) -> None:
    config, kv = configs
    with pytest.raises(UnsupportedError, match="VLLM_KV_CACHE_LAYOUT"):
        _build(world, config, replace(kv, kv_cache_layout=order), KVConnectorRole.SCHEDULER)


def _build(world: World, config: Any, kv: Any, role: Any) -> ScriptedConnector:
    world.use()
    return ScriptedConnector(config, role, kv)


@pytest.mark.parametrize(
    "shape",
    [(16, 2, 32, 10), (16, 3, 32, 8), (15, 2, 32, 8), (32, 2, 16, 8)],
)
def test_tensors_that_are_not_as_promised_are_refused(world, configs, shape) -> None:
    config, kv = configs
    worker = _build(world, config, kv, KVConnectorRole.WORKER)
    names = kv.kv_cache_groups[0].layer_names
    with pytest.raises(UnsupportedError, match="does not match"):
        worker.register_kv_caches({name: torch.zeros(shape) for name in names})
    transposed = {name: torch.zeros(16, 32, 2, 8).transpose(1, 2) for name in names}
    with pytest.raises(UnsupportedError, match="does not match"):
        worker.register_kv_caches(transposed)
    with pytest.raises(UnsupportedError, match="no KV cache for layers"):
        worker.register_kv_caches({names[0]: torch.zeros(16, 2, 32, 8)})
    worker.shutdown()


def test_constructor_forms(world: World, configs) -> None:
    """B38: three arguments by position and by name; two are refused in words."""
    config, kv = configs
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        one = _build(world, config, kv, role)
        two = ScriptedConnector(vllm_config=config, role=role, kv_cache_config=kv)
        assert one.role == two.role == role
        one.shutdown()
        two.shutdown()
        two.shutdown()
        with pytest.raises(UnsupportedError, match=r"kv_cache_config.*>=0\.32,<0\.34"):
            UCMConnector(config, role)
        with pytest.raises(UnsupportedError, match=r"kv_cache_config.*>=0\.32,<0\.34"):
            UCMConnector(vllm_config=config, role=role)


@pytest.fixture
def lines() -> Any:
    """Messages of our logger."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep()
    logger = logging.getLogger("ucm.vllm")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("version", ["0.34.0", "1.0", "0.34.1rc1+cpu"])
def test_untested_versions_say_one_line(version: str, lines: list[str]) -> None:
    versions.check_version(version)
    (line,) = lines
    assert version in line
    assert ">=0.32,<0.34" in line


@pytest.mark.parametrize("version", ["0.31.9", "0.8.5.post1"])
def test_old_versions_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"too old.*>=0\.32"):
        versions.check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.4+cu130", None])
def test_tested_versions_say_nothing(version: str | None, lines: list[str]) -> None:
    versions.check_version(version)
    assert lines == []


def test_every_other_version_is_told_what_to_do(lines: list[str]) -> None:
    versions.check_version("0.40.0")
    with pytest.raises(UnsupportedError) as refused:
        versions.check_version("0.20.0")
    for text in (lines[0], str(refused.value)):
        assert "pip install 'vllm>=0.32,<0.34'" in text
        assert "start without UCMConnector" in text


def test_a_vllm_without_what_we_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """B39: the module that is missing, the release that lacks it, and what to install."""
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    monkeypatch.delitem(sys.modules, "ucm_vllm.connector")
    with pytest.raises(UnsupportedError) as refused:
        versions.load_connector()
    assert "cache_hit_source" in str(refused.value)
    assert versions.running_version() in str(refused.value)
    assert "pip install" in str(refused.value)


class Unfinished(UCMConnector):
    """As under a vLLM whose interface has a method that we do not know."""


def test_a_vllm_that_asks_for_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unfinished, "__abstractmethods__", frozenset({"warp_kv"}))
    with pytest.raises(UnsupportedError, match=r"warp_kv.*supported vLLM: >=0\.32"):
        versions.load_connector(__name__, "Unfinished")


def test_registering_twice_is_quiet_and_the_name_is_enough() -> None:
    register.register()
    register._done = False
    register.register()
    assert KVConnectorFactory.get_connector_class_by_name("UCMConnector") is UCMConnector


# -- the whole start, with the real configuration and plugin host -----------------------------------------


def _open(config: Any, kv: Any, extra: dict[str, Any], role: str = "scheduler") -> Any:
    config.kv_transfer_config.kv_connector_extra_config = extra
    return startup.open_deployment(config, kv, role)


def _pipeline(name: str, **options: Any) -> dict[str, Any]:
    return {
        "model_id": "scripted",
        "ucm_connectors": [
            {
                "ucm_connector_name": "UcmPipelineStore",
                "ucm_connector_config": {"store_pipeline": name, **options},
            }
        ],
    }


def test_zero_options_choose_and_say_everything(configs, tmp_path, monkeypatch, lines) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    deployment = _open(*configs, {"model_id": "scripted"})
    assert deployment.settings.roots == (tmp_path / "cache" / "ucm" / "kv",)
    text = "\n".join(lines)
    for words in ("pipeline Cache|Posix", str(tmp_path / "cache"), "blocks of 64 tokens", "chosen"):
        assert words in text
    deployment.close()


def test_a_pipeline_that_keeps_nothing_is_warned_about(configs, lines: list[str]) -> None:
    """B40."""
    _open(*configs, _pipeline("Empty")).close()
    assert any("pipeline Empty keeps nothing" in line for line in lines)


def test_policy_fail_is_warned_about_once(world: World, lines: list[str]) -> None:
    for policy, count in (("fail", 1), ("recompute", 0)):
        lines.clear()
        config = vllm_config(world, policy=policy)
        _open(config, kv_cache_config(config, 16), _pipeline("Fake")).close()
        _open(config, kv_cache_config(config, 16), _pipeline("Fake"), "worker").close()
        found = [line for line in lines if '"kv_load_failure_policy":"recompute"' in line]
        assert len(found) == count


def test_all_configuration_mistakes_are_listed(configs) -> None:
    extra = _pipeline("Fake", timeout_ms="soon", tiemout=3)
    with pytest.raises(ConfigError) as refused:
        _open(*configs, {**extra, "block_token": 64})
    assert len(refused.value.problems) == 3
    assert "block_tokens" in str(refused.value)


def test_a_wrong_configuration_is_refused_while_vllm_reads_its_arguments() -> None:
    """B25: before any process exists, where vLLM asks (it does when CUDA graphs are in use)."""
    assert not UCMConnector.requires_piecewise_for_cudagraph(_pipeline("Fake"))
    assert not UCMConnector.requires_piecewise_for_cudagraph({})
    with pytest.raises(ConfigError, match="tiemout"):
        UCMConnector.requires_piecewise_for_cudagraph(_pipeline("Fake", tiemout=3))


def test_a_refusal_opens_nothing(configs, tmp_path: Path, monkeypatch) -> None:
    """B25: nothing exists yet when a deployment is refused: no directory, no thread, no buffer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, kv = configs
    with pytest.raises(UnsupportedError):
        _open(config, _groups(kv, MAMBA), {})
    assert not (tmp_path / "cache").exists()
