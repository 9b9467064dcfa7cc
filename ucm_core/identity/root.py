"""The first predecessor of a content chain: what separates requests that share tokens but not KV."""

from __future__ import annotations

import hashlib
import struct

_TAG = b"sglang-cache-namespace-v1"


def _part(value: str | None) -> bytes:
    if value is None:
        return b"\x00"
    text = value.encode()
    return b"\x01" + struct.pack("<Q", len(text)) + text


def chain_root(lora_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """Predecessor of the first link: ``b""`` without LoRA and salt, else 32 bytes.

    ``SHA-256("sglang-cache-namespace-v1" || part(lora_key) || part(cache_salt))`` where a part is
    ``00`` if absent, else ``01 || length as u64 LE || utf-8``. This is SGLang's own rule, so that its
    page keys are our links. ``None`` (absent) and ``""`` (given, empty) differ.

    ``lora_key`` names the adapter by content (:func:`ucm_core.identity.weights.adapter_key`), never
    by its served name or load order.
    """
    if lora_key is None and cache_salt is None:
        return b""
    return hashlib.sha256(_TAG + _part(lora_key) + _part(cache_salt)).digest()
