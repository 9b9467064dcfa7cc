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

from tiny_models.checkpoint import cache_root, ensure_model, write_model
from tiny_models.models import MODELS
from tiny_models.recipes import ModelRecipe, TensorRecipe

__all__ = ["MODELS", "ModelRecipe", "TensorRecipe", "cache_root", "ensure_model", "write_model"]
