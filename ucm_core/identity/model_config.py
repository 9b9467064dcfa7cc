"""What a checkpoint's ``config.json`` says about its KV, read alike by every engine's adapter.

The file is used as written: what a library or an engine makes of it (defaults, renamed keys) changes with
their versions, differs between engines, and even between the processes of one, whose models change it while
they are built. Two engines of one checkpoint must find equal fields.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.identity.encoding import Encodable, encode
from ucm_core.identity.seed import ModelIdentity

_log = logging.getLogger(__name__)

#: Keys that name things or steer sampling; every other key may change KV bytes.
CONFIG_LABELS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "attention_dropout",
    }
)

#: Canonical names of the element types of a KV cache, by torch's.
KV_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
#: Configurations of models with several parts keep the language model's in one of these.
_TEXT_KEYS = ("text_config", "llm_config", "language_config")


def checkpoint_dir(name_or_path: str, revision: str | None = None) -> Path | None:
    """The checkpoint on this machine: a path as given, or the hub cache's snapshot of it; else None."""
    given = Path(name_or_path)
    if given.exists():
        return given
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name_or_path, revision=revision, local_files_only=True))
    except (
        Exception
    ) as error:  # many kinds: not cached, no such repository, bad name, no such package
        _log.debug("no local snapshot of %s: %s", name_or_path, error)
        return None


def read_config(checkpoint: Path | None) -> dict[str, Any] | None:
    """``config.json`` of a checkpoint as written, None where there is none. Raises ConfigError."""
    path = checkpoint / "config.json" if checkpoint is not None else None
    if path is None or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def config_digest(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> str:
    """Hex digest of a configuration without its labels, and of the operator's overrides."""
    kept = {k: v for k, v in config.items() if k not in CONFIG_LABELS}
    return hashlib.sha256(
        b"ucm/config/1" + encode([plain(kept), plain(overrides or {})])
    ).hexdigest()


def rope_facts(
    config: Mapping[str, Any], overrides: Mapping[str, Any] | None, context_length: int | None
) -> dict[str, Encodable] | None:
    """Rope parameters as configuration and overrides have them. ``context_length`` counts where it
    chooses among scaling factors. None: the configuration names none."""
    effective = {**_text_part(config), **(overrides or {}), **_text_part(overrides or {})}
    found = {name: plain(effective.get(name)) for name in _ROPE_KEYS}
    kept: dict[str, Encodable] = {n: value for n, value in found.items() if value is not None}
    if kept and any(word in str(kept) for word in ("longrope", "dynamic")):
        kept["max_model_len"] = context_length
    return kept or None


def model_identity(
    weights: str,
    config: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    kv_dtype: str,
    compute_dtype: str,
    quantization: str | None,
    context_length: int | None,
) -> ModelIdentity:
    """Everything all groups of a model share that changes the bytes of their KV.

    ``weights``: value of the weights identity. ``config``: ``config.json`` as written. ``compute_dtype``:
    torch's name of the activations' type, ``"bfloat16"``. ``quantization``: of the weights, by the
    checkpoint's name of the method. Adapters of all engines build their identity here, so that equal
    deployments have equal fields.
    """
    return ModelIdentity(
        weights=weights,
        kv_dtype=kv_dtype,
        quantization=quantization,
        rope=rope_facts(config, overrides, context_length),
        extra={"config": config_digest(config, overrides), "compute_dtype": compute_dtype},
    )


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for key in _TEXT_KEYS:
        part = config.get(key)
        if isinstance(part, Mapping):
            inner.update(part)
    return {**config, **inner}


def plain(value: Any) -> Encodable:
    """JSON-like data as the canonical encoding takes it; anything else by its type's name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [plain(v) for v in items]
    to_dict = getattr(value, "to_dict", None)
    if to_dict is not None:
        return plain(to_dict())
    return str(value)
