"""Checkpoints on disk, and the directory that keeps them."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tiny_models.models import MODELS
from tiny_models.recipes import ModelRecipe, TensorRecipe
from tiny_models.tensors import tensors_of

FloatArray = npt.NDArray[np.float32]


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
