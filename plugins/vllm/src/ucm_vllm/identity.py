"""What vLLM tells about a model and a request, as identities of the core.

The scheduler and every worker call the same functions with the same configuration, so their ids are
equal by construction.
"""

from __future__ import annotations

import hashlib
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
    ModelIdentity,
    WeightsIdentity,
    adapter_key,
    chain_root,
    model_config,
    weights_identity,
)
from ucm_core.identity.model_config import KV_DTYPES
from ucm_vllm.facts import Facts

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.request import Request


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
    return model_config.model_identity(
        weights.value,
        _config(model),
        operator_overrides(model),
        kv_dtype=kv_dtype(facts),
        compute_dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        context_length=model.max_model_len,
    )


def kv_dtype(facts: Facts) -> str:
    """Canonical element type of the cache; vLLM's plain ``fp8`` means e4m3."""
    named = facts.kv_cache_dtype
    if named.startswith("fp8"):
        return "fp8_e5m2" if "e5m2" in named else "fp8_e4m3"
    return KV_DTYPES.get(facts.dtype, facts.dtype)


def operator_overrides(model: ModelConfig) -> Mapping[str, Any]:
    """What the operator changes of config.json. Raises UnsupportedError where nobody can say."""
    overrides = model.hf_overrides
    if callable(overrides):
        raise UnsupportedError(
            "hf_overrides is a function: its effect on the KV cannot be put into an identity; use a "
            "dictionary"
        )
    return overrides or {}


def _config(model: ModelConfig) -> Mapping[str, Any]:
    written = model_config.read_config(local_model_path(model))
    if written is not None:
        return written
    made: Mapping[str, Any] = model.hf_config.to_dict()
    return made


def local_model_path(model: ModelConfig) -> Path | None:
    """The checkpoint on this machine: a path as given, or the hub cache's snapshot."""
    return model_config.checkpoint_dir(model.model, model.revision)


def find_weights(vllm_config: VllmConfig, model_id: str | None) -> WeightsIdentity:
    """Identity of the weights; ``model_id`` overrides. Random weights are named by their seed."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if model_id is None and load.load_format == "dummy":
        return WeightsIdentity(f"id:dummy-weights-seed-{model.seed}", "load_format=dummy")
    return weights_identity(local_model_path(model), model_id=model_id)
