"""Writes the model of the TTFT benchmarks: an 82 M-parameter Llama with fixed-seed weights.

Runs in the engine's environment (needs torch and safetensors), as a program of its own:
``python -m benchmarks.support.model DIRECTORY``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HIDDEN, LAYERS, VOCAB, INNER = 768, 12, 4096, 2048
HEADS, KV_HEADS, HEAD = 12, 4, 64
#: Large enough that attention, and so the KV, decides which token comes out.
WEIGHT_SCALE = 0.06

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write_model(directory: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` unless they are there already."""
    if (directory / "model.safetensors").exists():
        return
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(99)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * WEIGHT_SCALE).to(torch.bfloat16)

    def norm() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN),
        "lm_head.weight": weight(VOCAB, HIDDEN),
        "model.norm.weight": norm(),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": weight(HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD),
            f"{at}.mlp.gate_proj.weight": weight(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": weight(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": weight(HIDDEN, INNER),
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.post_attention_layernorm.weight": norm(),
        }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
    part = directory / "model.safetensors.part"
    save_file(tensors, part, {"format": "pt"})
    part.rename(directory / "model.safetensors")


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
