"""Tensors of what layers are made of. Every weight has a real scale: see the package's text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tiny_models.recipes import TensorRecipe


def linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> TensorRecipe:
    return TensorRecipe(f"{name}.weight", (outputs, inputs), std=gain / math.sqrt(inputs))


def norm(name: str, size: int, value: float = 1.0) -> TensorRecipe:
    return TensorRecipe(f"{name}.weight", (size,), value=value)


def mlp(prefix: str, hidden: int, inner: int) -> Iterator[TensorRecipe]:
    yield linear(f"{prefix}.gate_proj", inner, hidden)
    yield linear(f"{prefix}.up_proj", inner, hidden)
    yield linear(f"{prefix}.down_proj", hidden, inner)


def grouped_attention(prefix: str, c: Mapping[str, Any], qk_norm: bool) -> Iterator[TensorRecipe]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    # Sharp attention that dominates the residual stream: one changed key changes the answer.
    sharp = 1.0 if qk_norm else 2.0
    yield linear(f"{prefix}.q_proj", heads * dim, hidden, sharp)
    yield linear(f"{prefix}.k_proj", kv_heads * dim, hidden, sharp)
    yield linear(f"{prefix}.v_proj", kv_heads * dim, hidden)
    yield linear(f"{prefix}.o_proj", hidden, heads * dim, 6.0)
    if qk_norm:
        yield norm(f"{prefix}.q_norm", dim, 2.0)
        yield norm(f"{prefix}.k_norm", dim, 2.0)


def latent_attention(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    q_rank, kv_rank = c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield linear(f"{prefix}.q_a_proj", q_rank, hidden)
    yield norm(f"{prefix}.q_a_layernorm", q_rank)
    yield linear(f"{prefix}.q_b_proj", heads * (nope + rope), q_rank, 1.5)
    yield linear(f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    yield norm(f"{prefix}.kv_a_layernorm", kv_rank)
    yield linear(f"{prefix}.kv_b_proj", heads * (nope + v_dim), kv_rank, 1.5)
    yield linear(f"{prefix}.o_proj", hidden, heads * v_dim, 6.0)


def mamba2(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    """A state that remembers about a hundred tokens, so that a wrong one changes the answer."""
    hidden, heads, kernel = c["hidden_size"], c["mamba_n_heads"], c["mamba_d_conv"]
    inner = heads * c["mamba_d_head"]
    convolved = inner + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    yield linear(f"{prefix}.in_proj", inner + convolved + heads, hidden)
    yield TensorRecipe(f"{prefix}.conv1d.weight", (convolved, 1, kernel), std=kernel**-0.5)
    yield TensorRecipe(f"{prefix}.conv1d.bias", (convolved,), std=0.1)
    yield TensorRecipe(f"{prefix}.A_log", (heads,), value=-4.0)
    yield TensorRecipe(f"{prefix}.D", (heads,), value=0.5)
    yield TensorRecipe(f"{prefix}.dt_bias", (heads,), value=0.0)
    if c.get("mamba_rms_norm", True):
        yield norm(f"{prefix}.norm", inner)
    yield linear(f"{prefix}.out_proj", hidden, inner, 4.0)


def gated_delta_net(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    hidden, kernel = c["hidden_size"], c["linear_conv_kernel_dim"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads = c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    yield linear(f"{prefix}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
    yield linear(f"{prefix}.in_proj_ba", 2 * heads, hidden)
    shape = (2 * keys + values, 1, kernel)
    yield TensorRecipe(f"{prefix}.conv1d.weight", shape, std=kernel**-0.5)
    yield TensorRecipe(f"{prefix}.A_log", (heads,), value=-4.0)
    yield TensorRecipe(f"{prefix}.dt_bias", (heads,), value=0.0)
    yield norm(f"{prefix}.norm", c["linear_value_head_dim"])
    yield linear(f"{prefix}.out_proj", hidden, values, 4.0)
