"""Which weights a model runs: two fine-tunes under one name must never share KV.

The identity digests names, dtypes, shapes and sampled spans of every tensor of a checkpoint. It does
not depend on the directory's path, on how the tensors are spread over files, or on whether the files
are hub links or copies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ucm_core.errors import ConfigError
from ucm_core.identity import sampling
from ucm_core.identity.encoding import Encodable, encode

logger = logging.getLogger(__name__)

Method = Literal["sampled", "full"]

#: Patterns in the order engines prefer them; the first kind present is the checkpoint.
_RAW_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.gguf")
#: Not weights although they match a raw pattern.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt")
_BLOB_NAME = re.compile(r"[0-9a-f]{64}")
_READERS = 8


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """``value``: what goes into seeds. ``source``: how it was found, for the start-up report."""

    value: str
    source: str


def weights_identity(
    model_dir: str | os.PathLike[str] | None,
    *,
    model_id: str | None = None,
    method: Method = "sampled",
    cache_dir: Path | None = None,
) -> WeightsIdentity:
    """Identity of the checkpoint in ``model_dir`` (a directory, or one weights file).

    ``model_id``: an operator's own name for the weights; overrides and reads nothing. ``method``:
    ``"full"`` hashes every byte (the content hash in a hub blob's name is taken instead of reading).
    ``cache_dir``: where results are kept by device, inode, size and mtime; default
    ``$XDG_CACHE_HOME/ucm/weights``. Raises ConfigError when there are no weights to look at.
    """
    if model_id is not None:
        if not model_id:
            raise ConfigError("model_id is empty; give a name that changes with the weights")
        return WeightsIdentity(f"id:{model_id}", "model_id")
    if model_dir is None or not Path(model_dir).exists():
        raise ConfigError(
            f"model weights: {model_dir} does not exist on this machine, so the weights cannot be "
            "told apart from others; set model_id to a name that changes whenever the weights do"
        )
    files = checkpoint_files(Path(model_dir))
    directory = cache_dir or default_cache_dir()
    key = _cache_key(files, method)
    kept = _read_cache(directory / f"{key}.txt")
    if kept is not None:
        return WeightsIdentity(kept, f"{method}, kept result for {len(files)} files")
    digest = _full(files) if method == "full" else _sampled(files)
    if _cache_key(files, method) != key:
        raise ConfigError(
            f"{model_dir}: the weight files changed while they were read; start again when the "
            "download has finished"
        )
    value = f"{method}:{digest.hex()}"
    _write_cache(directory / f"{key}.txt", value)
    return WeightsIdentity(value, f"{method}, {len(files)} files read")


def adapter_key(
    adapter_dir: str | os.PathLike[str],
    *,
    method: Method = "sampled",
    cache_dir: Path | None = None,
) -> str:
    """LoRA key by content, for :func:`~ucm_core.identity.root.chain_root`.

    Covers the adapter's tensors and its ``adapter_config.json`` (rank and alpha scale the result).
    Neither its served name nor the order it was loaded in matters.
    """
    weights = weights_identity(adapter_dir, method=method, cache_dir=cache_dir)
    path = Path(adapter_dir) / "adapter_config.json"
    facts: Encodable = None
    if path.is_file():
        try:
            loaded = json.loads(path.read_bytes())
        except (OSError, ValueError) as e:
            raise ConfigError(f"{path}: cannot be read as JSON ({e})") from e
        facts = {k: v for k, v in loaded.items() if k not in _ADAPTER_LABELS}
    whole = encode([weights.value, facts], str(path))
    return "lora:" + hashlib.sha256(b"ucm/adapter/1" + whole).hexdigest()


#: Keys of adapter_config.json that name things and change no byte.
_ADAPTER_LABELS = frozenset({"base_model_name_or_path", "revision", "inference_mode"})


def checkpoint_files(where: Path) -> list[Path]:
    """The weight files an engine would load: those of a safetensors index, else all safetensors,
    else raw formats. Raises ConfigError when there are none."""
    if where.is_file():
        return [where]
    index = where / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
            raise ConfigError(f"{index}: not a safetensors index ({e}); download it again") from e
        missing = [name for name in named if not (where / name).is_file()]
        if missing:
            raise ConfigError(
                f"{index}: names {len(missing)} files that are not there ({missing[0]}, ...); "
                "finish the download or set model_id"
            )
        return [where / name for name in named]
    safetensors = sorted(where.glob("*.safetensors"))
    if safetensors:
        return safetensors
    raw = {p for pattern in _RAW_PATTERNS for p in where.glob(pattern)}
    files = sorted(p for p in raw if p.name not in _NOT_WEIGHTS)
    if not files:
        raise ConfigError(
            f"{where}: holds no weights (*.safetensors, {', '.join(_RAW_PATTERNS)}), so they cannot "
            "be told apart from others; set model_id to a name that changes whenever they do"
        )
    return files


def _sampled(files: list[Path]) -> bytes:
    """SHA-256 over all tensors by name; files without tensor headers count as one raw tensor each."""
    with ThreadPoolExecutor(min(_READERS, len(files)), "ucm-weights") as pool:
        parts = list(pool.map(_file_parts, files))
    items: list[Encodable] = [list(item) for item in sorted(i for p in parts for i in p)]
    return hashlib.sha256(b"ucm/weights/sampled/1" + encode(items)).digest()


def _file_parts(path: Path) -> list[tuple[str, bytes]]:
    try:
        if path.suffix == ".safetensors":
            return list(sampling.tensor_digests(path).items())
        return [(path.suffix, sampling.raw_digest(path))]
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror} (errno {e.errno})") from e


def _full(files: list[Path]) -> bytes:
    """SHA-256 over the files' content hashes; their names do not matter."""
    try:
        hashes = sorted(_blob_hash(path) or sampling.full_digest(path) for path in files)
    except OSError as e:
        raise ConfigError(f"{e.filename}: cannot be read: {e.strerror} (errno {e.errno})") from e
    items: list[Encodable] = list(hashes)
    return hashlib.sha256(b"ucm/weights/full/1" + encode(items)).digest()


def _blob_hash(path: Path) -> bytes | None:
    """The SHA-256 in the name of a hub cache's blob (``snapshots/x/f -> ../../blobs/<sha256>``)."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    if target.parent.name == "blobs" and _BLOB_NAME.fullmatch(target.name):
        return bytes.fromhex(target.name)
    return None


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ucm" / "weights"


def _cache_key(files: Iterable[Path], method: Method) -> str:
    """Names a kept result: hub blobs by their content hash, other files by device, inode, size and
    mtime. Suffixes count because they choose the reader."""
    items: list[Encodable] = []
    for path in files:
        blob = _blob_hash(path)
        try:
            st = path.stat()
        except OSError as e:
            raise ConfigError(f"{path}: cannot be read: {e.strerror} (errno {e.errno})") from e
        place: list[Encodable] = [st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns]
        items.append([path.suffix, *([blob, st.st_size] if blob else place)])
    return hashlib.sha256(b"ucm/weights/kept/1" + encode([method, items])).hexdigest()


def _read_cache(path: Path) -> str | None:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text.strip() if re.fullmatch(r"(sampled|full):[0-9a-f]{64}\n", text) else None


def _write_cache(path: Path, value: str) -> None:
    """Keep a result; failing to costs time at the next start, nothing else."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(value + "\n")
        temporary.replace(path)
    except OSError as e:
        logger.warning("%s: the weights identity is not kept for the next start: %s", path, e)
        with contextlib.suppress(OSError):
            temporary.unlink()
