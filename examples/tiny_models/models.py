"""The models by name: configurations as Hugging Face has them, small."""

from __future__ import annotations

from typing import Any

from tiny_models.recipes import ModelRecipe

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

# The same with the scaled rope that SGLang's CPU engine insists on for latent attention.
MODELS["deepseek_yarn"] = MODELS["deepseek_v3"].with_config(
    rope_scaling={
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
)
