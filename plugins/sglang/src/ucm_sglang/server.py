"""What the SGLang server of this process runs, as far as a cache cares, and what of it is refused.

A storage backend is told ranks and a name; everything else is asked of SGLang's own server arguments,
which are the same in every rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.identity import (
    Encodable,
    ModelIdentity,
    WeightsIdentity,
    adapter_key,
    model_config,
    weights_identity,
)


@dataclass(frozen=True, slots=True)
class Server:
    """``config``: the checkpoint's configuration as written. ``kv_heads``, ``layers``: of the whole model.
    ``window``: of its sliding layers. ``weights_version``: changes when weights are replaced in place."""

    checkpoint: Path | None
    config: Mapping[str, Any]
    overrides: Mapping[str, Any]
    compute_dtype: str
    quantization: str | None
    context_length: int
    kv_heads: int
    layers: int
    window: int | None
    kv_cache_dtype: str
    dummy_seed: int | None
    adapters: Mapping[str, str]

    def weights(self, model_id: str | None) -> WeightsIdentity:
        """Identity of the weights; ``model_id`` overrides. Random weights are named by their seed."""
        if model_id is None and self.dummy_seed is not None:
            return WeightsIdentity(
                f"id:sglang-dummy-weights-seed-{self.dummy_seed}", "load_format=dummy"
            )
        return weights_identity(self.checkpoint, model_id=model_id)

    def identity(self, weights: WeightsIdentity, kv_dtype: str) -> ModelIdentity:
        """What all pools share that changes bytes; equal to another engine's of the same deployment."""
        identity = model_config.model_identity(
            weights.value,
            self.config,
            self.overrides,
            kv_dtype=kv_dtype,
            compute_dtype=self.compute_dtype,
            quantization=self.quantization,
            context_length=self.context_length,
        )
        if not self.adapters:
            return identity
        adapters: dict[str, Encodable] = dict(self.adapters)
        return identity.with_extra(sglang_adapters=adapters)


def read_server() -> tuple[Server, list[str]]:
    """The server and the reasons why it cannot be cached. Raises ConfigError for unreadable files."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    model = ModelConfig.from_server_args(arguments)
    checkpoint = model_config.checkpoint_dir(model.model_path, model.revision)
    written = model_config.read_config(checkpoint)
    dummy = str(arguments.load_format) == "dummy"
    adapters, problems = _adapters(arguments)
    problems += deployment_problems(arguments, model)
    server = Server(
        checkpoint=checkpoint,
        config=written if written is not None else model.hf_config.to_dict(),
        overrides=_overrides(arguments.json_model_override_args),
        compute_dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        context_length=int(model.context_len),
        kv_heads=int(model.get_total_num_kv_heads()),
        layers=int(model.num_hidden_layers),
        window=model.sliding_window_size,
        kv_cache_dtype=str(arguments.kv_cache_dtype),
        dummy_seed=arguments.random_seed if dummy else None,
        adapters=adapters,
    )
    return server, problems


def deployment_problems(arguments: Any, model: Any) -> list[str]:
    """What is wrong whatever the pools are."""
    problems = []
    if model.is_multimodal:
        problems.append(
            "the model takes images or audio, which enter SGLang's page keys by a short hash of theirs: "
            "not told apart safely; start with --language-only, or without a storage backend"
        )
    if getattr(arguments, "speculative_algorithm", None) not in (None, "NONE", "NGRAM"):
        problems.append(
            f"speculative algorithm {arguments.speculative_algorithm!r} keeps draft layers beside the "
            "model's, which is not supported; start without it"
        )
    if int(getattr(arguments, "attn_cp_size", 1) or 1) > 1:
        problems.append("context parallelism is not supported; set --attn-cp-size 1")
    return problems


def weights_version() -> tuple[str, str]:
    """Changes when SGLang was told that its weights were replaced while it runs."""
    from sglang.srt.runtime_context import get_server_args, get_serving

    return str(get_serving().weight_version), str(get_server_args().model_path)


def _adapters(arguments: Any) -> tuple[dict[str, str], list[str]]:
    """LoRA id -> content of the adapters fixed at start. SGLang's keys name adapters by name and path, so
    their content goes into every id; one whose content is unknown is a reason to refuse."""
    if not arguments.enable_lora:
        return {}, []
    if not arguments.lora_paths:
        return {}, [
            "LoRA adapters that are loaded later are known by an opaque key alone; name all of them at "
            "start with --lora-paths, or start without a storage backend"
        ]
    found: dict[str, str] = {}
    problems: list[str] = []
    for reference in arguments.lora_paths:
        path = Path(str(reference.lora_path))
        try:
            if not path.exists():
                raise ConfigError(f"{path} is not a local directory, so its content is unknown")
            found[str(reference.lora_id)] = adapter_key(path)
        except (OSError, ValueError, ConfigError) as error:
            problems.append(f"LoRA adapter {reference.lora_name!r}: {error}")
    return found, problems


def _overrides(text: str | None) -> dict[str, Any]:
    found = json.loads(text or "{}")
    if not isinstance(found, dict):
        raise ConfigError(f"--json-model-override-args: expected an object, got {text!r}")
    return found
