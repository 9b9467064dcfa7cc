"""What a server is told at start: refusals with the way out, wrong options, what an operator reads."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from host_pools import Rank, gqa_pool, keys, serve, storage_config
from ucm_core.errors import ConfigError, UnsupportedError
from ucm_core.plugins import PluginHost


@pytest.fixture(autouse=True)
def _server() -> None:
    serve()


def test_layer_first_is_refused_with_the_layouts_to_choose(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"layer_first.*page_first.*page_first_direct"):
        Rank(tmp_path, pool=gqa_pool("layer_first"))
    assert not list(tmp_path.rglob("manifest.json")), "refused before anything was made"


def test_unknown_pools_are_refused_by_name(tmp_path: Path) -> None:
    class NewPoolHost:
        layout = "page_first"

    with pytest.raises(UnsupportedError, match="NewPoolHost.*MHATokenToKVPoolHost"):
        Rank(tmp_path, pool=NewPoolHost())


def test_every_reason_is_listed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        Rank(tmp_path, pool=gqa_pool("layer_first"), told={"attn_cp_size": 2})
    assert "layer_first" in str(caught.value)
    assert "context parallelism" in str(caught.value)


def test_slices_that_do_not_fit(tmp_path: Path) -> None:
    Rank(tmp_path, options={"namespace": "one"}).close()
    with pytest.raises(UnsupportedError, match="head_slices"):
        Rank(
            tmp_path,
            pool=gqa_pool(heads=1),
            options={"namespace": "one"},
            told={"tp_size": 2},
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage_backend": "/tmp"}, "storage_backends"),
        ({"stagin_buffer_gb": 1}, "staging_buffer_gb"),
        ({"store_pipeline": "Possix"}, "Posix"),
        ({"timeout_ms": -1}, "timeout_ms"),
    ],
)
def test_wrong_options_are_errors_with_the_nearest_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Rank(tmp_path, options=options)


def test_a_file_instead_of_inline_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucm_sglang.backend import UCMStorage

    file = tmp_path / "ucm.yaml"
    file.write_text(f"store_pipeline: Posix\nstorage_backends: {tmp_path / 'kv'}\n")
    monkeypatch.setenv("UCM_CONFIG_FILE", str(file))
    backend = UCMStorage(storage_config({"backend_name": "ucm", "interface_v1": 1}))
    backend.register_mem_pool_host(gqa_pool())
    backend.on_host_pools_registered()
    assert (tmp_path / "kv" / "default" / "manifest.json").is_file()
    backend.close()


def test_no_option_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang owns a host cache: the default is files alone."""
    from ucm_sglang.deployment import read_options

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, _ = read_options({"backend_name": "ucm", "module_path": "m", "class_name": "c"})
    assert config.pipeline.stages == ("Posix",)


def test_an_operator_reads_what_was_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ucm.sglang"):
        Rank(tmp_path, options={"store_pipeline": "Empty"}).close()
    text = caplog.text
    assert "namespace default: pages of 64 tokens" in text
    assert "keeps nothing" in text


def test_late_pools_are_left_alone(tmp_path: Path) -> None:
    one = Rank(tmp_path)
    one.backend.register_mem_host_pool_v2(gqa_pool(), "late")
    transfer = SimpleNamespace(name="late", keys=keys(1), host_indices=one.fill(1))
    assert one.backend.batch_set_v2([transfer]) == {"late": [False]}
    assert one.backend.batch_get_v2([transfer]) == {"late": [False]}
    one.close()


def test_the_engine_is_registered() -> None:
    (spec,) = [s for s in PluginHost().load().engines.values() if s.name == "sglang"]
    assert "UCMStorage" in spec.turn_on
    assert spec.tested_versions == ("0.5.23",)
