"""What the engine's arguments say about a deployment; what is refused at start, with the reason.

Only what other parts cannot see is read here: block size and layout come from the registered memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ucm_core.errors import UnsupportedError
from ucm_core.identity import model_config


@dataclass(frozen=True, slots=True)
class Facts:
    """``rank`` of ``tp`` holds its part of the heads; ``tp`` is 1 where attention is data parallel (each
    rank then owns whole requests, ``owner`` being its number). ``dtype``: of the activations, torch's name.
    ``kv_option``: what ``kv_cache_config.dtype`` says. ``config``: the checkpoint's ``config.json``."""

    model: str
    checkpoint: Path | None
    config: Mapping[str, Any]
    dtype: str
    kv_option: str
    quantization: str | None
    context_length: int | None
    tp: int
    rank: int
    owner: int
    partial_reuse: bool
    block_reuse: bool
    window_option: Any

    @property
    def tp_rank(self) -> int:
        """The rank among those that share a request."""
        return self.rank if self.tp > 1 else 0

    @property
    def schedules(self) -> bool:
        """The scheduler's side is in this process."""
        return self.tp_rank == 0


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV heads of the whole model, elements of a head (of MLA: of the latent row), and whether it is MLA."""

    heads: int
    head_size: int
    latent: bool
    layers: int


def read_facts(llm_args: Any, rank: int) -> Facts:
    """The facts, or UnsupportedError listing everything that cannot be served."""
    problems = deployment_problems(llm_args)
    name = str(getattr(llm_args, "model", ""))
    checkpoint = model_config.checkpoint_dir(name, getattr(llm_args, "revision", None))
    config = model_config.read_config(checkpoint)
    if config is None:
        problems.append(
            f"model {name!r} has no config.json on this machine, so its KV heads are unknown: give the "
            "path of a checkpoint in Hugging Face format"
        )
    if problems:
        raise UnsupportedError(
            "UCM cannot serve this deployment:\n" + "\n".join(f"  - {text}" for text in problems)
        )
    assert config is not None
    data_parallel = bool(getattr(llm_args, "enable_attention_dp", False))
    kv = getattr(llm_args, "kv_cache_config", None)
    return Facts(
        model=name,
        checkpoint=checkpoint,
        config=config,
        dtype=_dtype(str(getattr(llm_args, "dtype", "auto")), config),
        kv_option=str(getattr(kv, "dtype", "auto")),
        quantization=_quantization(llm_args, config),
        context_length=getattr(llm_args, "max_seq_len", None),
        tp=1 if data_parallel else int(getattr(llm_args, "tensor_parallel_size", 1)),
        rank=rank,
        owner=rank if data_parallel else 0,
        partial_reuse=bool(getattr(kv, "enable_partial_reuse", True)),
        block_reuse=bool(getattr(kv, "enable_block_reuse", True)),
        window_option=getattr(kv, "max_attention_window", None),
    )


def deployment_problems(llm_args: Any) -> list[str]:
    """What is wrong whatever the model is: what the engine itself refuses beside a connector, and what
    would make a stored block mean something else."""
    problems = []
    for name, why in (
        ("pipeline_parallel_size", "the engine has no connector across pipeline stages"),
        ("context_parallel_size", "a rank holds parts of sequences instead of whole blocks"),
        ("max_beam_width", "the engine reports the blocks of one beam alone"),
    ):
        value = getattr(llm_args, name, 1) or 1
        if value > 1:
            problems.append(f"{name}={value}: {why}; set it to 1")
    kv = getattr(llm_args, "kv_cache_config", None)
    for name in ("host_cache_size", "disk_cache_size"):
        if getattr(kv, name, None):
            problems.append(
                f"kv_cache_config.{name} is set: blocks that the engine moves to its own {name[:4]} tier "
                "have no address here; leave it out, UCM is that tier"
            )
    if getattr(llm_args, "sparse_attention_config", None) is not None:
        problems.append(
            "sparse_attention_config: index caches outside the registered pools would be missing in what "
            "is loaded; leave it out"
        )
    tp, node = (
        getattr(llm_args, "tensor_parallel_size", 1),
        getattr(llm_args, "gpus_per_node", None),
    )
    if node and tp > node and not getattr(llm_args, "enable_attention_dp", False):
        problems.append(
            f"tensor_parallel_size={tp} over nodes of {node} GPUs: what the scheduler has verified lies in "
            "the memory of its node, and there is no way to hear of a failed load on another one"
        )
    return problems


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return {**config, **config[key]}
    return config


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """Heads and sizes as the checkpoint states them. Raises UnsupportedError where it does not."""
    text = text_part(config)
    layers = text.get("num_hidden_layers")
    if layers and text.get("kv_lora_rank"):
        rows = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
        return KvShape(1, rows, True, int(layers))
    query = text.get("num_attention_heads")
    heads = text.get("num_key_value_heads") or query
    size = text.get("head_dim") or (query and int(text.get("hidden_size", 0)) // int(query))
    if not (layers and heads and size):
        raise UnsupportedError(
            "config.json names no num_hidden_layers, num_attention_heads or head size: the KV heads of "
            "this model are unknown"
        )
    return KvShape(int(heads), int(size), False, int(layers))


def _dtype(option: str, config: Mapping[str, Any]) -> str:
    if option not in ("auto", ""):
        return option.removeprefix("torch.")
    text = text_part(config)
    named = text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    return str(named).removeprefix("torch.")


def _quantization(llm_args: Any, config: Mapping[str, Any]) -> str | None:
    algorithm = getattr(getattr(llm_args, "quant_config", None), "quant_algo", None)
    if algorithm is not None:
        return str(getattr(algorithm, "value", algorithm))
    method = (config.get("quantization_config") or {}).get("quant_method")
    return None if method is None else str(method)
