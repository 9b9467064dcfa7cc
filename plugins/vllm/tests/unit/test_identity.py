"""What must never share KV never does, and what may share does: on vLLM's real scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from scripted_engine import ScriptedConnector, World, prompt
from ucm_core.errors import UnsupportedError


def _hit(engine: Any, tokens: list[int], settings: dict[str, Any] | None = None, **kw: Any) -> int:
    """Tokens that a fresh engine takes from the store for this request."""
    e = engine(**(settings or {}))
    e.check_bytes = False  # the scripted model knows tokens and salt only
    e.generate("b", tokens, **kw)
    assert e.pending() == {}
    return int(e.counted.get("hit_tokens", 0))


def test_salts_do_not_share(engine, world: World) -> None:
    """B04."""
    tokens = prompt(1, 200)
    engine().generate("a", tokens, cache_salt="x")
    assert _hit(engine, tokens, cache_salt="x") == 192
    assert _hit(engine, tokens, cache_salt="y") == 0
    assert _hit(engine, tokens, cache_salt=None) == 0
    assert _hit(engine, tokens, cache_salt="") == 0


def test_prompt_embeddings_are_left_alone(engine, world: World) -> None:
    """B04: never a negative hit, nothing saved under the ids of placeholder tokens."""
    e = engine()
    e.check_bytes = False
    request = e.add("a", None, prompt_embeds=torch.zeros(200, 16))
    assert e.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert e.connector.get_num_new_matched_tokens(request, 192) == (0, False)
    e.run()
    assert world.objects == {}
    assert e.counted["uncacheable_requests|prompt_embeds"] == 1
    assert e.pending() == {}
    assert _hit(engine, [0] * 200) == 0


def test_streaming_input_is_left_alone(engine, world: World) -> None:
    e = engine()
    request = e.request("a", prompt(2, 200), resumable=True)
    assert e.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert e.connector._sched.stats.data["uncacheable_requests|streaming"] == 1


def test_prompt_logprobs_take_no_hit_and_are_saved(engine, world: World) -> None:
    """B17."""
    tokens = prompt(3, 200)
    first = engine()
    first.add("a", tokens, prompt_logprobs=1)
    first.run()
    assert len(world.objects) == 3
    assert _hit(engine, tokens, prompt_logprobs=1) == 0
    assert _hit(engine, tokens) == 192


def _image(identifier: str | None, offset: int, length: int = 30) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,  # type: ignore[arg-type]
        mm_position=PlaceholderRange(offset=offset, length=length),
        mm_hash=None,
    )


def _chain(engine: Any, tokens: list[int], **kw: Any) -> list[bytes]:
    return [bytes(link) for link in engine.chain_of(tokens, **kw).links]


def test_images_by_content_and_place(engine, world: World) -> None:
    """B03: same text, other image; the same image moved by one token; no hash at all."""
    e = engine()
    tokens = prompt(4, 320)
    first = _chain(e, tokens, mm_features=[_image("aaaa" * 16, 80)])
    same = _chain(e, tokens, mm_features=[_image("aaaa" * 16, 80)])
    other = _chain(e, tokens, mm_features=[_image("bbbb" * 15 + "aaaa", 80)])
    moved = _chain(e, tokens, mm_features=[_image("aaaa" * 16, 81)])
    text = _chain(e, tokens)
    assert first == same
    for links in (other, moved, text):
        assert links[0] == first[0]
        assert not set(links[1:]) & set(first[1:])
    e._hasher = (
        None  # vLLM itself refuses an item without a hash as soon as it hashes for its cache
    )
    request = e.request("x", tokens, mm_features=[_image(None, 80)])
    assert e.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert e.connector._sched.stats.data["uncacheable_requests|no_identity"] == 1


def test_images_through_the_scheduler(engine, world: World) -> None:
    """B03 on vLLM's real scheduler (scripted worker): what an item reaches is not shared, the rest is."""
    tokens = prompt(4, 320)

    def hit(identifier: str, offset: int) -> int:
        e = engine()
        e.check_bytes = False
        e.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
        e.scheduler.max_num_encoder_input_tokens = 1000
        e.generate("b", tokens, mm_features=[_image(identifier, offset)])
        assert e.pending() == {}
        return int(e.counted.get("hit_tokens", 0))

    assert hit("aaaa" * 16, 80) == 0
    assert hit("aaaa" * 16, 80) == 256 + 32
    assert hit("bbbb" * 15 + "aaaa", 80) == 64
    assert hit("aaaa" * 16, 81) == 64
    assert _hit(engine, tokens) == 64


def _adapter(folder: Path, seed: int) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir()
    weights = np.random.default_rng(seed).random((8, 16), dtype=np.float32)
    save_file({"layers.0.q.lora_A.weight": weights}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    return folder


def _lora(name: str, number: int, path: Path, **kw: Any) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path), **kw)


def test_adapters_by_content(engine, world: World, tmp_path: Path) -> None:
    """B02: neither the name nor the order of loading decides, the weights do."""
    e = engine()
    tokens = prompt(5, 200)
    x, y = _adapter(tmp_path / "x", 1), _adapter(tmp_path / "y", 2)
    none = _chain(e, tokens)
    x1 = _chain(e, tokens, lora_request=_lora("one", 1, x))
    y1 = _chain(e, tokens, lora_request=_lora("one", 1, y))
    x2 = _chain(e, tokens, lora_request=_lora("two", 7, x))
    assert len({none[0], x1[0], y1[0]}) == 3
    assert x1 == x2


def test_adapters_without_a_known_content_are_left_alone(engine, world: World, tmp_path) -> None:
    e = engine()
    side = e.connector._sched
    x = _adapter(tmp_path / "x", 1)
    for lora in (_lora("a", 1, Path("org/adapter")), _lora("b", 2, x, load_inplace=True)):
        request = e.request(lora.lora_name, prompt(6, 200), lora_request=lora)
        assert e.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert side.stats.data["uncacheable_requests|no_identity"] == 2
    # Changed on disk while the process runs: nobody knows which version vLLM has in memory.
    first = e.request("c", prompt(6, 200), lora_request=_lora("c", 3, x))
    assert side._record(first).chain is not None
    (x / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 32}))
    later = e.request("d", prompt(6, 200), lora_request=_lora("c", 3, x))
    assert side._record(later).chain is None


def test_one_number_for_two_adapters_is_left_alone(engine, world: World, tmp_path: Path) -> None:
    """vLLM keeps adapters by number: under a number that is taken it may compute with the old one."""
    e = engine()
    side = e.connector._sched
    x, y = _adapter(tmp_path / "x", 1), _adapter(tmp_path / "y", 2)
    chains = [
        side._record(e.request(name, prompt(6, 200), lora_request=_lora("one", number, path))).chain
        for name, number, path in (("a", 1, x), ("b", 1, y), ("c", 2, y), ("d", 1, x))
    ]
    assert [chain is not None for chain in chains] == [True, False, True, True]
    assert side.stats.data["uncacheable_requests|no_identity"] == 1


def _edit_config(world: World, **values: Any) -> None:
    path = world.model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20000.0},
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_facts_that_change_bytes_never_share(engine, world: World, change: dict[str, Any]) -> None:
    """B05."""
    tokens = prompt(7, 200)
    engine().generate("a", tokens)
    _edit_config(world, **change)
    assert _hit(engine, tokens) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"_name_or_path": "elsewhere"},
        {"transformers_version": "9.9"},
        {"torch_dtype": "float16"},
        {"bos_token_id": 7},
    ],
)
def test_labels_share(engine, world: World, change: dict[str, Any]) -> None:
    tokens = prompt(7, 200)
    engine().generate("a", tokens)
    _edit_config(world, **change)
    assert _hit(engine, tokens) == 192


def test_what_a_model_does_to_its_configuration_does_not_count(engine, world: World) -> None:
    """Models of vLLM write into the rope parameters while they are built: in the workers, not in the
    scheduler's process. The two must name the same objects all the same."""
    tokens = prompt(7, 200)
    e = engine()
    model = e.config.model_config
    model.hf_text_config.rope_parameters = {"rope_type": "yarn", "partial_rotary_factor": 0.5}
    built = ScriptedConnector(e.config, KVConnectorRole.WORKER, e.kv)
    seeds = [[at.seed for at in side._deployment.placement.all()] for side in (e.connector, built)]
    built.shutdown()
    assert seeds[0] == seeds[1]
    assert e.generate("a", tokens)


def test_engine_settings_that_change_bytes_never_share(engine, world: World) -> None:
    """B05, B35: dtype, overrides, and packed pages of another block size are clean misses."""
    tokens = prompt(8, 200)
    engine().generate("a", tokens)
    override = {"hf_overrides": {"rope_theta": 123.0}}
    assert _hit(engine, tokens, override) == 0
    assert _hit(engine, tokens, {"block_size": 64}) == 0
    assert _hit(engine, tokens, {"mla": True}) == 0
    world.settings["model_id"] = "other"
    assert _hit(engine, tokens) == 0
    world.settings["model_id"] = "scripted"
    assert _hit(engine, tokens, {"served_model_name": "alias", "max_num_seqs": 3}) == 192


@pytest.mark.parametrize(("saved", "served"), [(16, 64), (64, 16), (128, 32), (32, 128)])
def test_plain_rows_do_not_depend_on_the_block_size(engine, world, saved: int, served: int) -> None:
    tokens = prompt(9, 300)
    wanted = engine(mla=True, block_size=saved).generate("a", tokens)
    e = engine(mla=True, block_size=served)
    assert e.generate("b", tokens) == wanted
    assert e.counted["hit_tokens"] == 256


def test_another_stored_block_in_one_directory(engine, world: World) -> None:
    """B05: refused with both values when the namespace is named, a clean miss when it is not."""
    tokens = prompt(10, 300)
    world.settings["namespace"] = "mine"
    engine().generate("a", tokens)
    world.settings["block_tokens"] = 128
    with pytest.raises(Exception, match=r"block_tokens 64.*128"):
        engine()
    del world.settings["namespace"]
    assert _hit(engine, tokens) == 0
    assert _hit(engine, tokens) == 256


def test_a_function_as_override_is_refused(engine, world: World) -> None:
    from ucm_vllm.identity import operator_overrides

    class Model:
        model = "x"
        hf_overrides = staticmethod(lambda config: config)

    with pytest.raises(UnsupportedError, match="dictionary"):
        operator_overrides(Model())  # type: ignore[arg-type]
