"""Tensors of one layer of families that have layers of their own kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tiny_models.parts import (
    gated_delta_net,
    grouped_attention,
    linear,
    mamba2,
    mlp,
    norm,
)
from tiny_models.recipes import TensorRecipe


def gemma_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    """Scales are stored as their distance from 1; each half is normalised again after it ran."""
    hidden, dim = c["hidden_size"], c["head_dim"]
    yield norm(f"{prefix}.input_layernorm", hidden, 0.0)
    yield norm(f"{prefix}.post_attention_layernorm", hidden, 2.0)
    yield norm(f"{prefix}.pre_feedforward_layernorm", hidden, 0.0)
    yield norm(f"{prefix}.post_feedforward_layernorm", hidden, 0.0)
    for name, heads in (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"])):
        yield linear(f"{prefix}.self_attn.{name}_proj", heads * dim, hidden)
        yield norm(f"{prefix}.self_attn.{name}_norm", dim, 1.0)
    yield linear(f"{prefix}.self_attn.v_proj", c["num_key_value_heads"] * dim, hidden)
    yield linear(f"{prefix}.self_attn.o_proj", hidden, c["num_attention_heads"] * dim)
    yield from mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])


def gpt_oss_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    """Attention with biases and sinks, and experts stacked in one tensor each."""
    hidden, inner, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    yield norm(f"{prefix}.input_layernorm", hidden)
    yield norm(f"{prefix}.post_attention_layernorm", hidden)
    yield from grouped_attention(f"{prefix}.self_attn", c, qk_norm=False)
    for name, size in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
        yield TensorRecipe(f"{prefix}.self_attn.{name}_proj.bias", (size,), std=0.1)
    yield TensorRecipe(f"{prefix}.self_attn.o_proj.bias", (hidden,), std=0.1)
    yield TensorRecipe(f"{prefix}.self_attn.sinks", (heads,), std=1.0)
    yield linear(f"{prefix}.mlp.router", experts, hidden)
    yield TensorRecipe(f"{prefix}.mlp.router.bias", (experts,), std=0.1)
    stacked = f"{prefix}.mlp.experts"
    yield TensorRecipe(f"{stacked}.gate_up_proj", (experts, hidden, 2 * inner), std=hidden**-0.5)
    yield TensorRecipe(f"{stacked}.gate_up_proj_bias", (experts, 2 * inner), std=0.1)
    yield TensorRecipe(f"{stacked}.down_proj", (experts, inner, hidden), std=inner**-0.5)
    yield TensorRecipe(f"{stacked}.down_proj_bias", (experts, hidden), std=0.1)


def granite_hybrid_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    hidden, inner = c["hidden_size"], c["shared_intermediate_size"]
    yield norm(f"{prefix}.input_layernorm", hidden)
    yield norm(f"{prefix}.post_attention_layernorm", hidden)
    if c["layer_types"][int(prefix.rsplit(".", 1)[1])] == "attention":
        yield from grouped_attention(f"{prefix}.self_attn", c, qk_norm=False)
    else:
        yield from mamba2(f"{prefix}.mamba", c)
    yield linear(f"{prefix}.shared_mlp.input_linear", 2 * inner, hidden)
    yield linear(f"{prefix}.shared_mlp.output_linear", hidden, inner)


def falcon_h1_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    yield norm(f"{prefix}.input_layernorm", c["hidden_size"])
    yield norm(f"{prefix}.pre_ff_layernorm", c["hidden_size"])
    yield from mamba2(f"{prefix}.mamba", {**c, "mamba_rms_norm": False})
    yield from grouped_attention(f"{prefix}.self_attn", c, qk_norm=False)
    yield from mlp(f"{prefix}.feed_forward", c["hidden_size"], c["intermediate_size"])


def nemotron_h_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    kind = c["hybrid_override_pattern"][int(prefix.rsplit(".", 1)[1])]
    yield norm(f"{prefix}.norm", c["hidden_size"])
    if kind == "*":
        yield from grouped_attention(f"{prefix}.mixer", c, qk_norm=False)
    elif kind == "M":
        names = {"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim"}
        names |= {"mamba_n_groups": "n_groups", "mamba_d_state": "ssm_state_size"}
        names |= {"mamba_d_conv": "conv_kernel"}
        yield from mamba2(f"{prefix}.mixer", {**c, **{k: c[v] for k, v in names.items()}})
    else:
        yield linear(f"{prefix}.mixer.up_proj", c["intermediate_size"], c["hidden_size"])
        yield linear(f"{prefix}.mixer.down_proj", c["hidden_size"], c["intermediate_size"])


def qwen3_next_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    """Scales are stored as their distance from 1."""
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    yield norm(f"{prefix}.input_layernorm", hidden, 0.0)
    yield norm(f"{prefix}.post_attention_layernorm", hidden, 0.0)
    if c["layer_types"][int(prefix.rsplit(".", 1)[1])] == "full_attention":
        yield linear(f"{prefix}.self_attn.q_proj", 2 * heads * dim, hidden)  # with a gate
        yield linear(f"{prefix}.self_attn.k_proj", kv_heads * dim, hidden)
        yield linear(f"{prefix}.self_attn.v_proj", kv_heads * dim, hidden)
        yield linear(f"{prefix}.self_attn.o_proj", hidden, heads * dim, 6.0)
        yield norm(f"{prefix}.self_attn.q_norm", dim, 1.0)
        yield norm(f"{prefix}.self_attn.k_norm", dim, 1.0)
    else:
        yield from gated_delta_net(f"{prefix}.linear_attn", c)
    inner = c["moe_intermediate_size"]
    yield linear(f"{prefix}.mlp.gate", c["num_experts"], hidden)
    yield from mlp(f"{prefix}.mlp.shared_expert", hidden, c["shared_expert_intermediate_size"])
    yield linear(f"{prefix}.mlp.shared_expert_gate", 1, hidden)
    for expert in range(c["num_experts"]):
        yield from mlp(f"{prefix}.mlp.experts.{expert}", hidden, inner)
