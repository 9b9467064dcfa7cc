"""What the engine tells about a model and a request, as identities of the core."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ucm_core.errors import ConfigError, UcmError
from ucm_core.identity import (
    ChainExtra,
    ContentChain,
    ModelIdentity,
    adapter_key,
    chain_root,
    weights_identity,
)
from ucm_core.identity.model_config import model_identity
from ucm_trtllm.facts import Facts
from ucm_trtllm.pages import KV_OPTIONS, KV_TYPES

#: What of a request has no identity here: (attribute, what it is).
_WITHOUT_IDENTITY = (
    ("prompt_embedding_table", "a prompt embedding table"),
    ("multimodal_embedding", "a multimodal embedding without a hash"),
    ("input_tokens_extra_ids", "extra ids beside its tokens"),
    ("encoder_tokens", "encoder tokens"),
)


class Uncacheable(Exception):
    """A request that must be left alone; the message says why."""


def kv_type(facts: Facts, registered: str | None) -> str:
    """Canonical element type of the cache: what was registered, else the engine's option."""
    if registered is not None and registered in KV_TYPES:
        return KV_TYPES[registered]
    option = facts.kv_option.lower()
    if option in ("auto", ""):
        return KV_TYPES.get(facts.dtype, facts.dtype)
    return KV_OPTIONS.get(option, KV_TYPES.get(option, option))


def identity_of(facts: Facts, dtype: str, model_id: str | None) -> tuple[ModelIdentity, str]:
    """What all groups share, and how the weights were identified."""
    weights = weights_identity(facts.checkpoint, model_id=model_id)
    identity = model_identity(
        weights.value,
        facts.config,
        kv_dtype=dtype,
        compute_dtype=facts.dtype,
        quantization=facts.quantization,
        context_length=facts.context_length,
    )
    if dtype.startswith("fp8") or dtype == "nvfp4":
        # Each engine chooses scales its own way: equal bytes would mean different values.
        identity = identity.with_extra(kv_scales="trtllm")
    return identity, weights.source


def request_chain(request: Any, block_tokens: int, adapters: AdapterKeys) -> ContentChain:
    """An empty chain with everything but tokens that a request's KV depends on. Raises Uncacheable.

    ``request`` may be the engine's native object, which has fewer fields than the Python one.
    """
    for name, what in _WITHOUT_IDENTITY:
        if _given(getattr(request, name, None)):
            raise Uncacheable(f"it has {what}")
    try:
        lora = adapters.key_of(request)
        extras = _media(request)
    except (UcmError, OSError, ValueError) as error:
        raise Uncacheable(str(error)) from error
    return ContentChain(block_tokens, chain_root(lora, _salt(request)), extras)


def _salt(request: Any) -> str | None:
    salt = getattr(request, "cache_salt", None)
    if salt is not None:
        return str(salt)
    # Releases before the text itself was handed on have a number made of it.
    number = getattr(request, "cache_salt_id", None)
    return None if number is None else f"trtllm-salt-id/{int(number)}"


def _media(request: Any) -> list[ChainExtra]:
    """One item per multimodal input. Items without a hash must not be treated as text."""
    hashes: Any = getattr(request, "multimodal_hashes", None)
    starts: Any = getattr(request, "multimodal_positions", None)
    lengths: Any = getattr(request, "multimodal_lengths", None)
    if not _given(hashes):
        if _given(starts) or _given(lengths):
            raise ValueError("a multimodal item has no content hash")
        return []
    if not _given(starts) or not _given(lengths):
        raise ValueError("multimodal items without positions")
    if not len(hashes) == len(starts) == len(lengths):
        raise ValueError(
            f"{len(hashes)} hashes, {len(starts)} positions and {len(lengths)} lengths of multimodal items"
        )
    return [
        ChainExtra(int(start), int(length), "media", _digest(item))
        for item, start, length in zip(hashes, starts, lengths, strict=True)
    ]


def _digest(item: Sequence[int]) -> bytes:
    """The engine keeps a hash as eight signed 32-bit numbers; all of them count."""
    raw = b"".join(int(part).to_bytes(4, "big", signed=True) for part in item)
    if len(raw) < 32:
        raise ValueError(f"a multimodal hash of {len(raw)} bytes is cut short: expected 32")
    return hashlib.sha256(b"trtllm-mm/1/" + raw).digest()


def _given(value: Any) -> bool:
    if value is None:
        return False
    try:
        return len(value) > 0
    except TypeError:
        return True


def token_array(tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The engine's token list, contiguous."""
    return np.array(tokens, dtype=np.int64)


class AdapterKeys:
    """LoRA adapters by content. The engine shows a number, and a path where it hands on its Python request:
    without the path nobody can tell what the number stands for, and the request is left alone.
    """

    def __init__(self) -> None:
        self._by_number: dict[int, str] = {}

    def key_of(self, request: Any) -> str | None:
        number = getattr(request, "lora_task_id", None)
        if number is None:
            return None
        path = getattr(request, "py_lora_path", None)
        if not path or not Path(path).exists():
            raise ConfigError(f"LoRA adapter {number} is known by its number alone")
        key = adapter_key(path)
        if key != self._by_number.setdefault(int(number), key):
            raise ConfigError(f"LoRA adapter {number} was used with other weights before")
        return key
