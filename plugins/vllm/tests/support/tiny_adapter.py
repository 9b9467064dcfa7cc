"""LoRA adapters for the generated checkpoints, written from a seed in the form that PEFT writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

RANK = 8


def write_adapter(directory: Path, checkpoint: str, seed: int) -> Path:
    """An adapter of ``q_proj`` and ``v_proj`` that changes keys' readers and values visibly."""
    from safetensors.numpy import save_file

    model = json.loads((Path(checkpoint) / "config.json").read_text())
    hidden, head = model["hidden_size"], model["head_dim"]
    outputs = {
        "q_proj": model["num_attention_heads"] * head,
        "v_proj": model["num_key_value_heads"] * head,
    }
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, width in outputs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = rng.normal(0, 1 / np.sqrt(hidden), (RANK, hidden))
            up = rng.normal(0, 1 / np.sqrt(RANK), (width, RANK))
            tensors[f"{stem}.lora_A.weight"] = down.astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = up.astype(np.float32)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(outputs),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
