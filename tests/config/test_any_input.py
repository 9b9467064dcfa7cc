"""Whatever an operator writes: a configuration, or one ``ConfigError`` with problems; nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm_core.errors import ConfigError

from .conftest import Loading

NAMES = st.sampled_from(
    [
        "store_pipeline",
        "storage_backends",
        "ucm_connectors",
        "ucm_connector_name",
        "ucm_connector_config",
        "cache_buffer_capacity_gb",
        "posix_io_engine",
        "io_direct",
        "health",
        "enabled",
        "failure_threshold",
        "timeout_ms",
        "use_layerwise",
        "UcmPipelineStore",
        "block_tokens",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=4)
    | st.sampled_from(
        ["Posix", "Cache|Posix", "Empty|", "4 GiB", "1e400 GiB", "-1", "/a:/b", "save"]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES | st.text(max_size=6) | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)
#: The same loader serves all examples: loading writes nothing and remembers nothing.
ANY = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def attempt(loading: Loading, inline: dict[Any, Any] | None, **env: str) -> None:
    try:
        config = loading.load(inline, **env)
    except ConfigError as error:
        why = str(error)
    else:
        assert config.pipeline.name in ("Posix", "Cache|Posix", "Empty")
        return
    assert why.strip(), "a refusal says why"


@ANY
@given(values=st.dictionaries(NAMES | st.text(max_size=6), VALUES, max_size=5))
def test_any_inline_keys(loading: Loading, values: dict[Any, Any]) -> None:
    attempt(loading, values)


@ANY
@given(values=VALUES)
def test_any_yaml_document(loading: Loading, tmp_path: Path, values: Any) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    attempt(loading, None, UCM_CONFIG_FILE=str(path))


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: 2001-99-99", "? [1]\n: 2", "a: !!int x"])
def test_documents_that_only_yaml_can_write(loading: Loading, tmp_path: Path, text: str) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="ucm.yaml"):
        loading.load(None, UCM_CONFIG_FILE=str(path))


@ANY
@given(
    content=st.binary(max_size=64)
    | st.text(alphabet="{}[]:,-&*!|>'\"%@`#?\n\t ab1", max_size=48).map(str.encode)
)
def test_any_bytes_as_a_file(loading: Loading, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ucm.yaml"
    path.write_bytes(content)
    attempt(loading, None, UCM_CONFIG_FILE=str(path))
