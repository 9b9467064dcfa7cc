"""The stub's executor with a model's real KV instead of made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stub_executor import StubExecutor, _spans
from stub_manager import StubRequest

#: ``[layers, kv, heads, tokens, head_size]``.
Values = npt.NDArray[Any]


class FilledExecutor(StubExecutor):
    """``values``: KV of a prompt's tokens, what the engine computes where it was given none; what lies beyond
    is zero. Nothing is checked here: tests look at :meth:`read`."""

    values: Values | None = None

    def _write(self, request: StubRequest, tokens: list[int], begin: int, end: int) -> None:
        for page_at, slot, first, last in _spans(begin, end, self.shape.page_tokens):
            for memory in self.memories:
                page = memory.pools[0][request.pages[0][page_at]]
                page[:, :, :, slot : slot + last - first] = 0
                if self.values is not None and first < self.values.shape[3]:
                    part = self.values[:, :, :, first:last]
                    page[:, :, :, slot : slot + part.shape[3]] = part

    def _check(self, request: StubRequest) -> None:
        """Nothing is known of the bytes."""

    def read(self, request: StubRequest, tokens: int) -> Values:
        """What lies in the request's pages for its first tokens."""
        parts = []
        for page_at, slot, first, last in _spans(0, tokens, self.shape.page_tokens):
            page = self.memories[0].pools[0][request.pages[0][page_at]]
            parts.append(page[:, :, :, slot : slot + last - first])
        return np.concatenate(parts, axis=3)


def first_layer(checkpoint: Path, config: dict[str, Any], tokens: list[int]) -> Values:
    """``[kv, heads, tokens, head_size]`` of layer 0 of a llama checkpoint, computed in NumPy."""
    weights = _tensors(checkpoint)
    eps, size = config["rms_norm_eps"], config["head_dim"]
    hidden = _rms(weights["model.embed_tokens.weight"][tokens], eps)
    hidden = hidden * weights["model.layers.0.input_layernorm.weight"]
    attention = "model.layers.0.self_attn"
    keys, values = (
        (hidden @ weights[f"{attention}.{name}_proj.weight"].T).reshape(len(tokens), -1, size)
        for name in ("k", "v")
    )
    half = size // 2
    angles = np.arange(len(tokens))[:, None] * config["rope_theta"] ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = keys[..., :half], keys[..., half:]
    keys = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return np.stack([keys.transpose(1, 0, 2), values.transpose(1, 0, 2)])


def _rms(values: Values, eps: float) -> Values:
    return values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + eps)


def _tensors(checkpoint: Path) -> dict[str, Values]:
    """All tensors of a checkpoint of one fp32 file, in float64."""
    (path,) = checkpoint.glob("*.safetensors")
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    found = {}
    for name, facts in json.loads(raw[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        assert facts["dtype"] == "F32", facts
        first, last = (8 + length + n for n in facts["data_offsets"])
        flat = np.frombuffer(raw[first:last], np.float32)
        found[name] = flat.reshape(facts["shape"]).astype(np.float64)
    return found
