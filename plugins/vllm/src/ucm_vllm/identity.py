"""What vLLM tells about a model and a request, as identities of the core.

The scheduler and every worker call the same functions with the same configuration, so their ids are
equal by construction.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.errors import ConfigError, UcmError, UnsupportedError
from ucm_core.identity import (
    ChainExtra,
    ContentChain,
    Encodable,
    ModelIdentity,
    WeightsIdentity,
    adapter_key,
    chain_root,
    encode,
    weights_identity,
)
from ucm_vllm.facts import DTYPES, Facts

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.request import Request

_log = logging.getLogger("ucm.vllm")

#: config.json keys that name things or steer sampling; every other key may change KV bytes.
_CONFIG_LABELS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "attention_dropout",
    }
)


class Uncacheable(Exception):
    """A request that must be left alone; ``kind`` is the label it is counted under."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def object_ids(seed: bytes, links: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """``uint8[N, 16]`` ids of the objects that ``links[N, 32]`` end at, for one coordinate's seed."""
    ids = np.empty((len(links), 16), dtype=np.uint8)
    if len(links):
        _native.hash.object_ids(seed, links, ids)
    return ids


def snapshot_ids(
    seed: bytes, links: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """``uint8[N, 16]`` ids of the states after ``positions[N]`` tokens, where ``links[N, 32]`` end."""
    ids = np.empty((len(links), 16), dtype=np.uint8)
    if len(links):
        where = np.ascontiguousarray(positions, dtype=np.uint64)
        _native.hash.snapshot_ids(seed, np.ascontiguousarray(links), where, ids)
    return ids


# -- requests ------------------------------------------------------------------------------------------


def request_chain(
    request: Request,
    block_tokens: int,
    lora_key: Callable[[Any], str],
    rotation: str | None = None,
) -> ContentChain:
    """An empty chain with everything but tokens that a request's KV depends on.

    Raises :class:`Uncacheable` when something it depends on has no identity.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise Uncacheable("prompt_embeds", "prompt embeddings have no identity here")
    if request.resumable:
        raise Uncacheable("streaming", "streaming input may replace tokens after they were hashed")
    try:
        lora = None if request.lora_request is None else lora_key(request.lora_request)
        extras = [_mm_extra(feature) for feature in request.mm_features]
    except (UcmError, OSError, ValueError) as error:
        raise Uncacheable("no_identity", str(error)) from error
    root = chain_root(lora, request.cache_salt)
    if rotation is not None:
        root = hashlib.sha256(b"ucm/rotation/1" + root + rotation.encode()).digest()
    return ContentChain(block_tokens, root, extras)


def _mm_extra(feature: Any) -> ChainExtra:
    """One multimodal item. A feature without an identifier must not be treated as text."""
    identifier = feature.identifier or feature.mm_hash
    if not identifier:
        raise ValueError(f"a {feature.modality} item has no content hash")
    digest = hashlib.sha256(f"vllm-mm/1/{identifier}".encode()).digest()
    position = feature.mm_position
    return ChainExtra(position.offset, position.length, feature.modality, digest)


class AdapterKeys:
    """LoRA adapters by content: neither their name, nor their path, nor their load order matters.

    An adapter whose files change while the process runs is left alone from then on, and so is one
    that comes under the number of another: vLLM keeps adapters by number, and nobody can tell which
    weights it has loaded.
    """

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._by_number: dict[int, str] = {}

    def __call__(self, lora_request: Any) -> str:
        path = Path(lora_request.lora_path)
        if lora_request.load_inplace:
            raise ConfigError(
                f"adapter {path} is reloaded in place: its content may change under us"
            )
        if not path.exists():
            raise ConfigError(f"adapter {path} is not a local directory, so its content is unknown")
        key = adapter_key(path)
        first = self._first.setdefault(str(path.resolve()), key)
        if key != first:
            raise ConfigError(f"adapter {path} changed on disk since this process first used it")
        number = lora_request.lora_int_id
        if key != self._by_number.setdefault(number, key):
            raise ConfigError(
                f"adapter {path} has number {number}, under which this process has used other weights"
            )
        return key


# -- the model -------------------------------------------------------------------------------------------


def model_identity(
    vllm_config: VllmConfig, facts: Facts, weights: WeightsIdentity
) -> ModelIdentity:
    """Everything all groups share that changes the bytes of their KV."""
    model = vllm_config.model_config
    extra: dict[str, Encodable] = {
        "config": config_digest(model),
        "compute_dtype": str(model.dtype).removeprefix("torch."),
    }
    return ModelIdentity(
        weights=weights.value,
        kv_dtype=kv_dtype(facts),
        quantization=model.quantization,
        rope=rope_facts(model),
        extra=extra,
    )


def kv_dtype(facts: Facts) -> str:
    """Canonical element type of the cache; vLLM's plain ``fp8`` means e4m3."""
    named = facts.kv_cache_dtype
    if named.startswith("fp8"):
        return "fp8_e5m2" if "e5m2" in named else "fp8_e4m3"
    return DTYPES.get(facts.dtype, facts.dtype)


def rope_facts(model: ModelConfig) -> dict[str, Encodable] | None:
    """Rope parameters as written in the checkpoint and overridden by the operator.

    Not as they are in vLLM's configuration object: models change that while they are built, in the
    processes that build them, so that the scheduler's would differ from the workers'.
    """
    written = {**_config(model), **_overrides(model)}
    text = written.get("text_config")
    config = {**written, **text} if isinstance(text, Mapping) else written
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    found = {name: _plain(config.get(name)) for name in names}
    kept: dict[str, Encodable] = {n: value for n, value in found.items() if value is not None}
    if kept and any(word in str(kept) for word in ("longrope", "dynamic")):
        kept["max_model_len"] = model.max_model_len  # chooses among the scaling factors
    return kept or None


def config_digest(model: ModelConfig) -> str:
    """Digest of the checkpoint's own config.json, minus labels, plus the operator's overrides.

    The file is used as written, because a library's defaults change with its version.
    """
    overrides = _plain(_overrides(model))
    kept = {k: v for k, v in _config(model).items() if k not in _CONFIG_LABELS}
    return hashlib.sha256(b"ucm/config/1" + encode([_plain(kept), overrides])).hexdigest()


def _overrides(model: ModelConfig) -> Mapping[str, Any]:
    overrides = model.hf_overrides
    if callable(overrides):
        raise UnsupportedError(
            "hf_overrides is a function: its effect on the KV cannot be put into an identity; use a "
            "dictionary"
        )
    return overrides or {}


def _config(model: ModelConfig) -> Mapping[str, Any]:
    directory = local_model_path(model)
    path = directory / "config.json" if directory is not None else None
    if path is None or not path.is_file():
        made: Mapping[str, Any] = model.hf_config.to_dict()
        return made
    try:
        config: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    return config


def _plain(value: Any) -> Encodable:
    """JSON-like data as the canonical encoding takes it; anything else by its type's name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(v) for v in items]
    to_dict = getattr(value, "to_dict", None)
    if to_dict is not None:
        return _plain(to_dict())
    return str(value)


def local_model_path(model: ModelConfig) -> Path | None:
    """The checkpoint on this machine: a path as given, or the hub cache's snapshot."""
    given = Path(model.model)
    if given.exists():
        return given
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:  # many kinds: not cached, no such repository, bad name
        _log.debug("no local snapshot of %s: %s", model.model, error)
        return None


def find_weights(vllm_config: VllmConfig, model_id: str | None) -> WeightsIdentity:
    """Identity of the weights; ``model_id`` overrides. Random weights are named by their seed."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if model_id is None and load.load_format == "dummy":
        return WeightsIdentity(f"id:dummy-weights-seed-{model.seed}", "load_format=dummy")
    return weights_identity(local_model_path(model), model_id=model_id)
