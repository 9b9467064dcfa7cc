"""load_config: forms, meaning, sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucm_core.errors import ConfigError

from .conftest import Loading, connector


def test_zero_options(loading: Loading) -> None:
    config = loading.load()
    assert config.pipeline.name == "Cache|Posix"
    assert list(config.stages) == ["Cache", "Posix"]
    files = config.stages["Posix"]
    assert files.storage_backends == (Path("/home/somebody/.cache/ucm/kv"),)
    assert config.sources["Posix", "storage_backends"].startswith("chosen")
    assert config.stages["Cache"].cache_buffer_capacity_gb == 2 << 30
    assert config.sources["Cache", "cache_buffer_capacity_gb"] == "chosen: because of the test"
    assert config.store.staging_buffer_gb == 1 << 30
    assert config.store.timeout_ms == 30_000
    assert config.core.persist_token_threshold == 0
    assert config.warnings == ()


def test_second_choice_of_the_default_pipeline_is_said(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucm_core.config.load.DEFAULT_PIPELINES", ("Gone|Posix", "Posix"))
    config = loading.load()
    assert config.pipeline.name == "Posix"
    (warning,) = config.warnings
    assert "unknown pipeline 'Gone|Posix'" in warning


def test_zero_options_follow_the_cache_home(loading: Loading) -> None:
    config = loading.load(XDG_CACHE_HOME="/big/cache")
    assert config.stages["Posix"].storage_backends == (Path("/big/cache/ucm/kv"),)


def test_reference_form(loading: Loading) -> None:
    given = connector(
        storage_backends="/a:/b", io_direct=False, posix_io_engine="psync", timeout_ms="5 s"
    )
    config = loading.load({**given, "persist_token_threshold": 100})
    files = config.stages["Posix"]
    assert files.storage_backends == (Path("/a"), Path("/b"))
    assert (files.io_direct, files.posix_io_engine) == (False, "psync")
    assert config.store.timeout_ms == 5000
    assert config.core.persist_token_threshold == 100
    assert config.sources["core", "persist_token_threshold"] == "inline"
    assert ("core", "block_tokens") not in config.sources


def test_one_key_goes_to_every_stage_that_has_it(loading: Loading) -> None:
    config = loading.load(connector("Cache|Posix", io_direct=False))
    assert config.stages["Cache"].io_direct is False
    assert config.stages["Posix"].io_direct is False


@pytest.mark.parametrize("key", ["io_direct", "use_direct", "transferIoDirect"])
def test_nfs_store_means_posix(loading: Loading, key: str) -> None:
    options = {"storage_backends": "/mnt", key: False, "kv_block_size": 33554432}
    connectors = [{"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": options}]
    config = loading.load({"ucm_connectors": connectors})
    assert config.pipeline.name == "Posix"
    assert config.stages["Posix"].io_direct is False
    assert [w for w in config.warnings if "kv_block_size" in w]


def test_nfs_store_with_another_pipeline_is_a_contradiction(loading: Loading) -> None:
    options = {"storage_backends": "/mnt", "store_pipeline": "Empty"}
    connectors = [{"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": options}]
    (problem,) = loading.problems({"ucm_connectors": connectors})
    assert "UcmNfsStore means 'Posix'" in problem


def test_old_and_flat_forms(loading: Loading) -> None:
    old = {"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": {"storage_backends": "/m"}}
    assert loading.load(old).pipeline.name == "Posix"
    flat = {"storage_backends": "/m", "timeout_ms": 10}
    config = loading.load(flat)
    assert config.pipeline.name == "Cache|Posix"
    assert config.stages["Posix"].storage_backends == (Path("/m"),)


def test_file_gives_lines_as_sources(loading: Loading, tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text(
        "# comment\n"
        "persist_token_threshold: 5\n"
        "ucm_connectors:\n"
        "  - ucm_connector_name: UcmPipelineStore\n"
        "    ucm_connector_config:\n"
        "      store_pipeline: Posix\n"
        "      storage_backends: /data\n"
    )
    config = loading.load({"UCM_CONFIG_FILE": str(path)})
    assert config.origin == str(path)
    assert config.sources["core", "persist_token_threshold"] == f"{path}:2"
    assert config.sources["pipeline", "store_pipeline"] == f"{path}:6"
    assert config.sources["Posix", "storage_backends"] == f"{path}:7"


@pytest.mark.parametrize("variable", ["UCM_CONFIG_FILE", "TRTLLM_UCM_CONFIG_FILE"])
def test_file_from_the_environment(loading: Loading, tmp_path: Path, variable: str) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text("block_tokens: 128\n")
    assert loading.load(None, **{variable: str(path)}).core.block_tokens == 128


def test_inline_file_goes_before_the_environment(loading: Loading, tmp_path: Path) -> None:
    near, far = tmp_path / "near.yaml", tmp_path / "far.yaml"
    near.write_text("block_tokens: 128\n")
    far.write_text("block_tokens: 32\n")
    config = loading.load({"UCM_CONFIG_FILE": str(near)}, UCM_CONFIG_FILE=str(far))
    assert config.core.block_tokens == 128


def test_file_and_inline_keys_are_refused(loading: Loading, tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text("")
    with pytest.raises(ConfigError, match="both a file .* and inline keys .*block_tokens"):
        loading.load({"block_tokens": 64}, UCM_CONFIG_FILE=str(path))


def test_empty_file_is_the_zero_option_start(loading: Loading, tmp_path: Path) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text("\n# nothing\n")
    assert loading.load(None, UCM_CONFIG_FILE=str(path)).pipeline.name == "Cache|Posix"


def test_engine_keys_are_left_to_the_engine(loading: Loading) -> None:
    from ucm_core.config.load import load_config

    given = {"engine_own_key": 1}
    assert loading.problems(given) == ["engine_own_key (inline): unknown key"]
    load_config(given, loading.env, loading.host, foreign_keys=frozenset(given))


def test_options_of_absent_stages_are_said_to_have_no_effect(loading: Loading) -> None:
    config = loading.load(connector("Posix", cache_buffer_capacity_gb=4))
    (warning,) = config.warnings
    assert "cache_buffer_capacity_gb" in warning
    assert "stage Cache" in warning


def test_every_entry_has_help_and_a_source(loading: Loading) -> None:
    entries = list(loading.load().entries())
    assert all(entry.source for entry in entries)
    assert [e.key for e in entries if not e.help] == []
    assert ("Posix", "io_direct") in {(e.section, e.key) for e in entries}
