"""Reading the header of a safetensors file: what tensors it holds and where their bytes lie."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass

from ucm_core.errors import ConfigError

#: A header larger than this is damage, not a checkpoint (the largest public ones are a few MiB).
_MAX_HEADER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor: ``begin`` and ``end`` are absolute byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(fd: int, path: str) -> list[TensorSpan]:
    """All tensors of an open safetensors file, by name. ``path`` names it in errors.

    Format: header length as u64 LE, that many bytes of JSON (tensor name -> dtype, shape,
    data_offsets relative to the end of the header), data. Raises ConfigError for a damaged file.
    """
    size = os.fstat(fd).st_size
    (length,) = struct.unpack("<Q", _exactly(fd, 8, 0, path))
    data = 8 + length
    if length > _MAX_HEADER_BYTES or data > size:
        raise ConfigError(
            f"{path}: a safetensors header of {length} bytes does not fit the file of {size} bytes; "
            "the file is damaged or no safetensors file: download it again"
        )
    try:
        header = json.loads(_exactly(fd, length, 8, path))
        tensors = [
            TensorSpan(
                name,
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                data + int(entry["data_offsets"][0]),
                data + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise ConfigError(f"{path}: unreadable safetensors header ({e}); download it again") from e
    for t in tensors:
        if not data <= t.begin <= t.end <= size:
            raise ConfigError(
                f"{path}: tensor {t.name!r} ends at byte {t.end}, the file has {size}; it is "
                "truncated: download it again"
            )
    return sorted(tensors, key=lambda t: t.name)


def _exactly(fd: int, count: int, offset: int, path: str) -> bytes:
    raw = os.pread(fd, count, offset)
    if len(raw) != count:
        raise ConfigError(
            f"{path}: {len(raw)} bytes at offset {offset}, expected {count}; the file is truncated"
        )
    return raw
