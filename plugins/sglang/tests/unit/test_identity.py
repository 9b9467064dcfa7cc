"""B05: what changes bytes is a miss, what does not is a hit; B04: salts; B02: adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed
from tiny_models import ensure_model

from host_pools import PAGE, Rank, gqa_pool, keys, serve
from ucm_core.errors import ConfigError, UnsupportedError


class Site:
    """A checkpoint that may be edited, and backends over one directory."""

    def __init__(self, path: Path) -> None:
        self.model = path / "model"
        self.root = path / "kv"
        shutil.copytree(ensure_model("llama"), self.model)
        self.ranks: list[Rank] = []

    def rank(self, server: dict[str, Any] | None = None, **how: Any) -> Rank:
        serve(self.model, **{"dtype": "float32", **(server or {})})
        self.ranks.append(Rank(self.root, **how))
        return self.ranks[-1]

    def save(self, **how: Any) -> None:
        writer = self.rank(**how)
        assert all(writer.backend.batch_set_v1(keys(2), writer.fill(2)))

    def hits(self, **how: Any) -> int:
        found: int = self.rank(**how).backend.batch_exists(keys(2))
        return found

    def edit(self, **values: Any) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for rank in made.ranks:
        rank.close()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-5},
    ],
)
def test_another_configuration(site: Site, change: dict[str, Any]) -> None:
    site.save()
    assert site.hits() == 2
    site.edit(**change)
    assert site.hits() == 0


def test_other_weights_under_the_same_name(site: Site) -> None:
    site.save()
    (path,) = site.model.glob("*.safetensors")
    data = np.fromfile(path, np.uint8)
    data[-5] ^= 1
    data.tofile(path)
    assert site.hits() == 0


def test_settings_that_change_bytes(site: Site) -> None:
    site.save()
    assert site.hits(server={"dtype": "bfloat16"}) == 0
    assert site.hits(pool=gqa_pool(dtype=torch.bfloat16)) == 0
    assert site.hits(server={"json_model_override_args": '{"rope_theta": 123.0}'}) == 0
    assert site.hits(options={"model_id": "other"}) == 0


def test_settings_that_do_not(site: Site, tmp_path: Path) -> None:
    site.save()
    site.edit(_name_or_path="elsewhere", transformers_version="9.9", bos_token_id=5)
    assert site.hits(server={"served_model_name": "alias"}) == 2
    assert site.hits(pool=gqa_pool("page_first_direct")) == 2
    moved = tmp_path / "moved"
    site.model.rename(moved)
    site.model = moved
    assert site.hits(told={"model_name": "another"}) == 2


def test_fp8_pages_are_not_bf16_pages(site: Site) -> None:
    """Both directions, and the two fp8 types."""
    kinds = {
        "auto": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
    for told, dtype in kinds.items():
        writer = site.rank(pool=gqa_pool(dtype=dtype), server={"kv_cache_dtype": told})
        assert writer.backend.batch_exists(keys(2)) == 0, f"{told} found pages of another type"
        assert all(writer.backend.batch_set_v1(keys(2), writer.empty(2)))
        again = site.rank(pool=gqa_pool(dtype=dtype), server={"kv_cache_dtype": told})
        assert again.backend.batch_exists(keys(2)) == 2
    with pytest.raises(UnsupportedError, match="--kv-cache-dtype fp8_e4m3 or fp8_e5m2"):
        site.rank(pool=gqa_pool(dtype=torch.float8_e5m2))


def test_another_page_size(site: Site) -> None:
    """Refused with both values when the namespace is named, a clean miss when it is not."""
    site.save()
    other = site.rank(pool=gqa_pool(page=32, pages=32), server={"page": 32})
    assert other.backend.batch_exists(keys(2, 32)) == 0
    site.save(options={"namespace": "mine"})
    with pytest.raises(ConfigError, match=r"block_tokens 64.*32"):
        site.rank(pool=gqa_pool(page=32), options={"namespace": "mine"})
    with pytest.raises(UnsupportedError, match=r"block_tokens is 128.*page has 64"):
        site.rank(options={"block_tokens": 128})


def test_tenants_do_not_share(site: Site) -> None:
    """B04: absent, empty and two salts are four different prefixes."""
    one = site.rank()
    tokens = list(range(2 * PAGE))
    prefixes = [
        get_hash_str(tokens, storage_namespace_seed(None, salt), page_size=PAGE)
        for salt in (None, "", "x", "y")
    ]
    for number, prefix in enumerate(prefixes):
        assert one.backend.batch_exists(prefix) == 0, number
        assert all(one.backend.batch_set_v1(prefix, one.fill(2)))
    assert [one.backend.batch_exists(prefix) for prefix in prefixes] == [2] * 4


def test_weights_replaced_while_it_runs(site: Site) -> None:
    """Nothing that was stored before, or is computed in between, is offered."""
    from sglang.srt.runtime_context import get_context

    one = site.rank()
    source = one.fill(2)
    assert all(one.backend.batch_set_v1(keys(2), source))
    get_context().override("test", weight_version="2")
    assert one.backend.batch_exists(keys(2)) == 0
    assert one.backend.batch_get_v1(keys(2), source) == [False, False]
    assert one.backend.batch_set_v1(keys(2, seed=5), source) == [False, False]
    assert site.hits() == 2, "a server that starts anew looks at the weights again"


def _lora(monkeypatch: pytest.MonkeyPatch, *paths: Path | str) -> None:
    """The server was started with these adapters."""
    from sglang.srt import runtime_context

    real = runtime_context.get_server_args

    def get_server_args() -> Any:
        class Arguments:
            enable_lora = True
            lora_paths: ClassVar[Any] = [
                SimpleNamespace(lora_id=f"id{i}", lora_name=f"a{i}", lora_path=str(p))
                for i, p in enumerate(paths)
            ]

            def __getattr__(self, name: str) -> Any:
                return getattr(real(), name)

        return Arguments()

    monkeypatch.setattr(runtime_context, "get_server_args", get_server_args)


def test_adapters_by_content(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucm_sglang import server

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 4}')
    shutil.copy(next(site.model.glob("*.safetensors")), adapter / "adapter_model.safetensors")
    serve(site.model)
    _lora(monkeypatch, adapter)
    found, problems = server._adapters(server_args())
    assert not problems
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    again, _ = server._adapters(server_args())
    assert found.keys() == again.keys()
    assert found != again, "other content under one name and path"


def server_args() -> Any:
    from sglang.srt import runtime_context

    return runtime_context.get_server_args()


def test_unknown_adapters_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucm_sglang import server

    serve(site.model)
    _lora(monkeypatch)
    _, problems = server._adapters(server_args())
    assert "--lora-paths" in problems[0]
    _lora(monkeypatch, "some/hub-name")
    _, problems = server._adapters(server_args())
    assert "not a local directory" in problems[0]
