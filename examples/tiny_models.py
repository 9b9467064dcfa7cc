"""Small random-weight models, written offline from fixed seeds: `config.json` + one safetensors file.

They stand in for real checkpoints in the demo, in tests and in benchmarks. Needs numpy only. Weights
have a real scale (unit-variance activations, attention logits with a standard deviation of about 4
and an attention output that outweighs the residual stream), so that what a model answers depends on
every cached key and value: changing one prompt token in 340 changes the first 12 answer tokens. With
the tiny weights of a freshly initialised model a wrong KV cache would go unnoticed.

Models are plain data (`MODELS`): a Hugging Face configuration and the list of tensors it implies.
A checkpoint lives in a directory named by a digest of its recipe: a changed recipe is a new model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

#: Raise when the meaning of a recipe changes without its data changing.
RECIPE_VERSION = 1


@dataclass(frozen=True)
class TensorRecipe:
    """One tensor: normal with standard deviation ``std``, or the constant ``value`` when std is 0."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class ModelRecipe:
    """``family`` picks the tensor list; ``config`` is the content of config.json."""

    family: str
    config: Mapping[str, Any]
    seed: int = 7
    gains: Mapping[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Storage dtype of the weights: ``float32`` or ``bfloat16``."""
        return str(self.config["torch_dtype"])

    def with_config(self, **changes: Any) -> ModelRecipe:
        """The same weights under another configuration (rope factor, dtype, ...)."""
        return replace(self, config={**self.config, **changes})

    def digest(self) -> str:
        """12 hex digits that change whenever any byte of the checkpoint would."""
        facts = [RECIPE_VERSION, self.family, self.config, self.seed, self.gains]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


_COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
    "torch_dtype": "float32",
}
_GQA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}

MODELS: dict[str, ModelRecipe] = {
    "qwen3": ModelRecipe(
        "qwen3",
        {**_COMMON, **_GQA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    ),
    "llama": ModelRecipe(
        "llama",
        {**_COMMON, **_GQA, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        seed=11,
    ),
    # Multi-head latent attention and experts. vLLM's CPU kernels want bf16 and the true latent sizes.
    "deepseek_v3": ModelRecipe(
        "deepseek_v3",
        {
            **_COMMON,
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "torch_dtype": "bfloat16",
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        seed=13,
    ),
    # Sliding windows of 128 tokens beside full attention: two of them a full layer, every other layer.
    "gemma3": ModelRecipe(
        "gemma3",
        {
            **{k: v for k, v in _COMMON.items() if k not in ("rope_theta", "hidden_act")},
            **_GQA,
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
        seed=19,
    ),
    "gpt_oss": ModelRecipe(
        "gpt_oss",
        {
            **{k: v for k, v in _COMMON.items() if k != "rope_theta"},
            **_GQA,
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        seed=23,
    ),
    # Recurrent states (Mamba2) beside attention, turn and turn about.
    "granite_hybrid": ModelRecipe(
        "granite_hybrid",
        {
            **_COMMON,
            **_GQA,
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
            "attention_multiplier": _GQA["head_dim"] ** -0.5,
        },
        seed=29,
    ),
    # A state and attention side by side in every layer.
    "falcon_h1": ModelRecipe(
        "falcon_h1",
        {
            **_COMMON,
            **_GQA,
            "model_type": "falcon_h1",
            "architectures": ["FalconH1ForCausalLM"],
            "num_hidden_layers": 3,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
        },
        seed=37,
    ),
    # Layers that are one thing each: state, attention, state, feed-forward.
    "nemotron_h": ModelRecipe(
        "nemotron_h",
        {
            **{k: v for k, v in _COMMON.items() if k not in ("rope_theta", "hidden_act")},
            **_GQA,
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "hybrid_override_pattern": "M*M-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "chunk_size": 256,
        },
        seed=41,
    ),
    # Gated delta rule in three of four layers. vLLM's CPU kernels want bf16 and heads of 128.
    "qwen3_next": ModelRecipe(
        "qwen3_next",
        {
            **{k: v for k, v in _COMMON.items() if k != "rope_theta"},
            **_GQA,
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "torch_dtype": "bfloat16",
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
        seed=31,
    ),
    # 40 M parameters: big enough that skipping a prefill shows on a clock.
    "demo": ModelRecipe(
        "llama",
        {
            **_COMMON,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 4096,
            "hidden_size": 640,
            "intermediate_size": 1792,
            "num_hidden_layers": 8,
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        seed=17,
    ),
}


def _linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> TensorRecipe:
    return TensorRecipe(f"{name}.weight", (outputs, inputs), std=gain / math.sqrt(inputs))


def _norm(name: str, size: int, value: float = 1.0) -> TensorRecipe:
    return TensorRecipe(f"{name}.weight", (size,), value=value)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[TensorRecipe]:
    yield _linear(f"{prefix}.gate_proj", inner, hidden)
    yield _linear(f"{prefix}.up_proj", inner, hidden)
    yield _linear(f"{prefix}.down_proj", hidden, inner)


def _grouped_attention(prefix: str, c: Mapping[str, Any], qk_norm: bool) -> Iterator[TensorRecipe]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    # Sharp attention that dominates the residual stream: one changed key changes the answer.
    sharp = 1.0 if qk_norm else 2.0
    yield _linear(f"{prefix}.q_proj", heads * dim, hidden, sharp)
    yield _linear(f"{prefix}.k_proj", kv_heads * dim, hidden, sharp)
    yield _linear(f"{prefix}.v_proj", kv_heads * dim, hidden)
    yield _linear(f"{prefix}.o_proj", hidden, heads * dim, 6.0)
    if qk_norm:
        yield _norm(f"{prefix}.q_norm", dim, 2.0)
        yield _norm(f"{prefix}.k_norm", dim, 2.0)


def _latent_attention(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    q_rank, kv_rank = c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield _linear(f"{prefix}.q_a_proj", q_rank, hidden)
    yield _norm(f"{prefix}.q_a_layernorm", q_rank)
    yield _linear(f"{prefix}.q_b_proj", heads * (nope + rope), q_rank, 1.5)
    yield _linear(f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    yield _norm(f"{prefix}.kv_a_layernorm", kv_rank)
    yield _linear(f"{prefix}.kv_b_proj", heads * (nope + v_dim), kv_rank, 1.5)
    yield _linear(f"{prefix}.o_proj", hidden, heads * v_dim, 6.0)


def _gemma_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    """Scales are stored as their distance from 1; each half is normalised again after it ran."""
    hidden, dim = c["hidden_size"], c["head_dim"]
    yield _norm(f"{prefix}.input_layernorm", hidden, 0.0)
    yield _norm(f"{prefix}.post_attention_layernorm", hidden, 2.0)
    yield _norm(f"{prefix}.pre_feedforward_layernorm", hidden, 0.0)
    yield _norm(f"{prefix}.post_feedforward_layernorm", hidden, 0.0)
    for name, heads in (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"])):
        yield _linear(f"{prefix}.self_attn.{name}_proj", heads * dim, hidden)
        yield _norm(f"{prefix}.self_attn.{name}_norm", dim, 1.0)
    yield _linear(f"{prefix}.self_attn.v_proj", c["num_key_value_heads"] * dim, hidden)
    yield _linear(f"{prefix}.self_attn.o_proj", hidden, c["num_attention_heads"] * dim)
    yield from _mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])


def _gpt_oss_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    """Attention with biases and sinks, and experts stacked in one tensor each."""
    hidden, inner, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    yield _norm(f"{prefix}.input_layernorm", hidden)
    yield _norm(f"{prefix}.post_attention_layernorm", hidden)
    yield from _grouped_attention(f"{prefix}.self_attn", c, qk_norm=False)
    for name, size in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
        yield TensorRecipe(f"{prefix}.self_attn.{name}_proj.bias", (size,), std=0.1)
    yield TensorRecipe(f"{prefix}.self_attn.o_proj.bias", (hidden,), std=0.1)
    yield TensorRecipe(f"{prefix}.self_attn.sinks", (heads,), std=1.0)
    yield _linear(f"{prefix}.mlp.router", experts, hidden)
    yield TensorRecipe(f"{prefix}.mlp.router.bias", (experts,), std=0.1)
    stacked = f"{prefix}.mlp.experts"
    yield TensorRecipe(f"{stacked}.gate_up_proj", (experts, hidden, 2 * inner), std=hidden**-0.5)
    yield TensorRecipe(f"{stacked}.gate_up_proj_bias", (experts, 2 * inner), std=0.1)
    yield TensorRecipe(f"{stacked}.down_proj", (experts, inner, hidden), std=inner**-0.5)
    yield TensorRecipe(f"{stacked}.down_proj_bias", (experts, hidden), std=0.1)


def _granite_hybrid_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    hidden, inner = c["hidden_size"], c["shared_intermediate_size"]
    yield _norm(f"{prefix}.input_layernorm", hidden)
    yield _norm(f"{prefix}.post_attention_layernorm", hidden)
    if c["layer_types"][int(prefix.rsplit(".", 1)[1])] == "attention":
        yield from _grouped_attention(f"{prefix}.self_attn", c, qk_norm=False)
    else:
        yield from _mamba2(f"{prefix}.mamba", c)
    yield _linear(f"{prefix}.shared_mlp.input_linear", 2 * inner, hidden)
    yield _linear(f"{prefix}.shared_mlp.output_linear", hidden, inner)


def _mamba2(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    """A state that remembers about a hundred tokens, so that a wrong one changes the answer."""
    hidden, heads, kernel = c["hidden_size"], c["mamba_n_heads"], c["mamba_d_conv"]
    inner = heads * c["mamba_d_head"]
    convolved = inner + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    yield _linear(f"{prefix}.in_proj", inner + convolved + heads, hidden)
    yield TensorRecipe(f"{prefix}.conv1d.weight", (convolved, 1, kernel), std=kernel**-0.5)
    yield TensorRecipe(f"{prefix}.conv1d.bias", (convolved,), std=0.1)
    yield TensorRecipe(f"{prefix}.A_log", (heads,), value=-4.0)
    yield TensorRecipe(f"{prefix}.D", (heads,), value=0.5)
    yield TensorRecipe(f"{prefix}.dt_bias", (heads,), value=0.0)
    if c.get("mamba_rms_norm", True):
        yield _norm(f"{prefix}.norm", inner)
    yield _linear(f"{prefix}.out_proj", hidden, inner, 4.0)


def _falcon_h1_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    yield _norm(f"{prefix}.input_layernorm", c["hidden_size"])
    yield _norm(f"{prefix}.pre_ff_layernorm", c["hidden_size"])
    yield from _mamba2(f"{prefix}.mamba", {**c, "mamba_rms_norm": False})
    yield from _grouped_attention(f"{prefix}.self_attn", c, qk_norm=False)
    yield from _mlp(f"{prefix}.feed_forward", c["hidden_size"], c["intermediate_size"])


def _nemotron_h_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    kind = c["hybrid_override_pattern"][int(prefix.rsplit(".", 1)[1])]
    yield _norm(f"{prefix}.norm", c["hidden_size"])
    if kind == "*":
        yield from _grouped_attention(f"{prefix}.mixer", c, qk_norm=False)
    elif kind == "M":
        names = {"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim"}
        names |= {"mamba_n_groups": "n_groups", "mamba_d_state": "ssm_state_size"}
        names |= {"mamba_d_conv": "conv_kernel"}
        yield from _mamba2(f"{prefix}.mixer", {**c, **{k: c[v] for k, v in names.items()}})
    else:
        yield _linear(f"{prefix}.mixer.up_proj", c["intermediate_size"], c["hidden_size"])
        yield _linear(f"{prefix}.mixer.down_proj", c["hidden_size"], c["intermediate_size"])


def _qwen3_next_layer(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    """Scales are stored as their distance from 1."""
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    yield _norm(f"{prefix}.input_layernorm", hidden, 0.0)
    yield _norm(f"{prefix}.post_attention_layernorm", hidden, 0.0)
    if c["layer_types"][int(prefix.rsplit(".", 1)[1])] == "full_attention":
        yield _linear(f"{prefix}.self_attn.q_proj", 2 * heads * dim, hidden)  # with a gate
        yield _linear(f"{prefix}.self_attn.k_proj", kv_heads * dim, hidden)
        yield _linear(f"{prefix}.self_attn.v_proj", kv_heads * dim, hidden)
        yield _linear(f"{prefix}.self_attn.o_proj", hidden, heads * dim, 6.0)
        yield _norm(f"{prefix}.self_attn.q_norm", dim, 1.0)
        yield _norm(f"{prefix}.self_attn.k_norm", dim, 1.0)
    else:
        yield from _gated_delta_net(f"{prefix}.linear_attn", c)
    inner = c["moe_intermediate_size"]
    yield _linear(f"{prefix}.mlp.gate", c["num_experts"], hidden)
    yield from _mlp(f"{prefix}.mlp.shared_expert", hidden, c["shared_expert_intermediate_size"])
    yield _linear(f"{prefix}.mlp.shared_expert_gate", 1, hidden)
    for expert in range(c["num_experts"]):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, inner)


def _gated_delta_net(prefix: str, c: Mapping[str, Any]) -> Iterator[TensorRecipe]:
    hidden, kernel = c["hidden_size"], c["linear_conv_kernel_dim"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads = c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    yield _linear(f"{prefix}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
    yield _linear(f"{prefix}.in_proj_ba", 2 * heads, hidden)
    shape = (2 * keys + values, 1, kernel)
    yield TensorRecipe(f"{prefix}.conv1d.weight", shape, std=kernel**-0.5)
    yield TensorRecipe(f"{prefix}.A_log", (heads,), value=-4.0)
    yield TensorRecipe(f"{prefix}.dt_bias", (heads,), value=0.0)
    yield _norm(f"{prefix}.norm", c["linear_value_head_dim"])
    yield _linear(f"{prefix}.out_proj", hidden, values, 4.0)


_WHOLE_LAYERS = {
    "gemma3": _gemma_layer,
    "gpt_oss": _gpt_oss_layer,
    "granite_hybrid": _granite_hybrid_layer,
    "falcon_h1": _falcon_h1_layer,
    "nemotron_h": _nemotron_h_layer,
    "qwen3_next": _qwen3_next_layer,
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
        yield _norm(f"{prefix}.input_layernorm", hidden)
        yield _norm(f"{prefix}.post_attention_layernorm", hidden)
        if recipe.family == "deepseek_v3":
            yield from _latent_attention(f"{prefix}.self_attn", c)
        else:
            qk_norm = recipe.family == "qwen3"
            yield from _grouped_attention(f"{prefix}.self_attn", c, qk_norm)
        if recipe.family == "deepseek_v3" and layer >= c["first_k_dense_replace"]:
            inner, experts = c["moe_intermediate_size"], c["n_routed_experts"]
            yield _linear(f"{prefix}.mlp.gate", experts, hidden)
            yield TensorRecipe(f"{prefix}.mlp.gate.e_score_correction_bias", (experts,), std=0.1)
            yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, inner * c["n_shared_experts"])
            for expert in range(experts):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, inner)
        else:
            yield from _mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])
    final = _FINAL_NORM.get(recipe.family, "model.norm")
    yield _norm(final, hidden, 0.0 if recipe.family in _ZERO_CENTRED else 1.0)
    yield _linear("lm_head", vocab, hidden, 4.0)


def _draw(tensor: TensorRecipe, rng: np.random.Generator) -> FloatArray:
    if tensor.std == 0.0:
        return np.full(tensor.shape, tensor.value, np.float32)
    values: FloatArray = rng.standard_normal(tensor.shape, np.float32)
    values *= np.float32(tensor.std)
    return values


def _encode(values: FloatArray, dtype: str) -> bytes:
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    halves: npt.NDArray[np.uint16] = (rounded >> np.uint32(16)).astype("<u2")
    return halves.tobytes()


def _write_safetensors(recipe: ModelRecipe, out: BinaryIO) -> None:
    tag, item = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}[recipe.dtype]
    tensors = list(tensors_of(recipe))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in tensors:
        size = math.prod(t.shape) * item
        header[t.name] = {
            "dtype": tag,
            "shape": list(t.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    rng = np.random.default_rng(recipe.seed)
    for t in tensors:
        out.write(_encode(_draw(t, rng), recipe.dtype))


def write_model(recipe: ModelRecipe, directory: Path) -> Path:
    """Write one checkpoint into ``directory``, which must not exist; appears whole or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        with (draft / "model.safetensors").open("wb") as out:
            _write_safetensors(recipe, out)
        (draft / "config.json").write_text(json.dumps(dict(recipe.config), indent=1) + "\n")
        draft.chmod(0o755)
        draft.rename(directory)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not (directory / "config.json").is_file():  # another process may have been first
            raise
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return directory


def cache_root() -> Path:
    """Where generated checkpoints are kept: ``$UCM_MODEL_CACHE`` or the user's cache directory."""
    override = os.environ.get("UCM_MODEL_CACHE")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ucm" / "models"


def ensure_model(name: str) -> Path:
    """Directory of the model ``name`` of `MODELS`, written on first use (seconds at most)."""
    recipe = MODELS[name]
    directory = cache_root() / f"{name}-{recipe.digest()}"
    if not (directory / "config.json").is_file():
        write_model(recipe, directory)
    return directory


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MODELS:
        print(ensure_model(wanted))
