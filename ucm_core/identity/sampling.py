"""Digests of checkpoint files, by sampled spans or in full."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ucm_core.errors import ConfigError
from ucm_core.identity.encoding import encode
from ucm_core.identity.safetensors import TensorSpan, read_tensors

#: One sampled span. A page: reading less saves no I/O.
SPAN_BYTES = 4096
#: Tensors up to this size are read whole.
WHOLE_BYTES = 4 * SPAN_BYTES
#: Files whose tensors cannot be told apart are sampled once in so many bytes.
RAW_STRIDE_BYTES = 1 << 20
_FULL_CHUNK_BYTES = 8 << 20
_PIECES_AT_ONCE = 64


def sample_offsets(begin: int, end: int) -> list[tuple[int, int]]:
    """(offset, length) spans read of a tensor at ``[begin, end)``: all of it when small, else the
    first, two inner and the last page."""
    size = end - begin
    if size <= WHOLE_BYTES:
        return [(begin, size)] if size else []
    last = size - SPAN_BYTES
    return [(begin + last * i // 3, SPAN_BYTES) for i in range(4)]


def tensor_digests(path: Path) -> dict[str, bytes]:
    """Tensor name -> SHA-256 over dtype, shape, size and sampled spans, for a safetensors file."""
    with open(path, "rb", buffering=0) as f:
        fd = f.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead around the spans
        return {t.name: _tensor(fd, t, path) for t in read_tensors(fd, str(path))}


def _tensor(fd: int, t: TensorSpan, path: Path) -> bytes:
    facts = encode([t.name, t.dtype, list(t.shape), t.end - t.begin])
    return _sampled(b"ucm/tensor/1" + facts, fd, sample_offsets(t.begin, t.end), path)


def raw_digest(path: Path) -> bytes:
    """SHA-256 over size and one page per MiB (and the last page) of a file of unknown structure."""
    with open(path, "rb", buffering=0) as f:
        size = os.fstat(f.fileno()).st_size
        spans = [(at, min(SPAN_BYTES, size - at)) for at in range(0, size, RAW_STRIDE_BYTES)]
        if size > SPAN_BYTES:
            spans.append((size - SPAN_BYTES, SPAN_BYTES))
        return _sampled(b"ucm/rawfile/1" + encode(size), f.fileno(), spans, path)


def full_digest(path: Path) -> bytes:
    """SHA-256 of the whole file."""
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as f:
        while chunk := f.read(_FULL_CHUNK_BYTES):
            sha.update(chunk)
    return sha.digest()


def _sampled(head: bytes, fd: int, spans: Iterable[tuple[int, int]], path: Path) -> bytes:
    """SHA-256 over ``head`` and the spans, hashed some at a time: each call hands the GIL over, which
    costs more than hashing a page."""
    sha = hashlib.sha256(head)
    pieces: list[bytes] = []
    for offset, length in spans:
        piece = os.pread(fd, length, offset)
        if len(piece) != length:
            raise ConfigError(
                f"{path}: {len(piece)} bytes at offset {offset}, expected {length}; the file "
                "changed while it was read: start again when the download has finished"
            )
        pieces.append(piece)
        if len(pieces) == _PIECES_AT_ONCE:
            sha.update(b"".join(pieces))
            pieces.clear()
    sha.update(b"".join(pieces))
    return sha.digest()
