"""All tensors of a model."""

from __future__ import annotations

from collections.abc import Iterator

from tiny_models.layers import (
    falcon_h1_layer,
    gemma_layer,
    gpt_oss_layer,
    granite_hybrid_layer,
    nemotron_h_layer,
    qwen3_next_layer,
)
from tiny_models.parts import grouped_attention, latent_attention, linear, mlp, norm
from tiny_models.recipes import ModelRecipe, TensorRecipe

_WHOLE_LAYERS = {
    "gemma3": gemma_layer,
    "gpt_oss": gpt_oss_layer,
    "granite_hybrid": granite_hybrid_layer,
    "falcon_h1": falcon_h1_layer,
    "nemotron_h": nemotron_h_layer,
    "qwen3_next": qwen3_next_layer,
}
#: Where the last norm has another name.
_FINAL_NORM = {"falcon_h1": "model.final_layernorm", "nemotron_h": "model.norm_f"}
#: Families that store a norm's scale as its distance from 1.
_ZERO_CENTRED = ("gemma3", "qwen3_next")


def tensors_of(recipe: ModelRecipe) -> Iterator[TensorRecipe]:
    """Every tensor of a model, in the order in which the random stream is drawn."""
    c = recipe.config
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    # Gemma multiplies its embeddings by the square root of their size.
    embedding = hidden**-0.5 if recipe.family == "gemma3" else 1.0
    yield TensorRecipe("model.embed_tokens.weight", (vocab, hidden), std=embedding)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        if recipe.family in _WHOLE_LAYERS:
            yield from _WHOLE_LAYERS[recipe.family](prefix, c)
            continue
        yield norm(f"{prefix}.input_layernorm", hidden)
        yield norm(f"{prefix}.post_attention_layernorm", hidden)
        if recipe.family == "deepseek_v3":
            yield from latent_attention(f"{prefix}.self_attn", c)
        else:
            qk_norm = recipe.family == "qwen3"
            yield from grouped_attention(f"{prefix}.self_attn", c, qk_norm)
        if recipe.family == "deepseek_v3" and layer >= c["first_k_dense_replace"]:
            inner, experts = c["moe_intermediate_size"], c["n_routed_experts"]
            yield linear(f"{prefix}.mlp.gate", experts, hidden)
            yield TensorRecipe(f"{prefix}.mlp.gate.e_score_correction_bias", (experts,), std=0.1)
            yield from mlp(f"{prefix}.mlp.shared_experts", hidden, inner * c["n_shared_experts"])
            for expert in range(experts):
                yield from mlp(f"{prefix}.mlp.experts.{expert}", hidden, inner)
        else:
            yield from mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])
    final = _FINAL_NORM.get(recipe.family, "model.norm")
    yield norm(final, hidden, 0.0 if recipe.family in _ZERO_CENTRED else 1.0)
    yield linear("lm_head", vocab, hidden, 4.0)
