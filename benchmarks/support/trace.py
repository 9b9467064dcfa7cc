"""The checked-in trace of real chat requests: rows of 512-token blocks that form a prefix tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

TRACE = Path(__file__).resolve().parents[2] / "native/tests/data/conversation.trace"
REQUESTS = 12_031


def requests(count: int = REQUESTS) -> Iterator[list[int]]:
    """Block numbers of each request, in file order. The last one of a row may be a partial block."""
    numbers = _numbers(TRACE.read_bytes())
    for _ in range(count):
        blocks: list[int] = []
        for _ in range(next(numbers)):
            first, length = next(numbers), next(numbers)
            blocks.extend(range(first, first + length))
        yield blocks


def _numbers(raw: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in raw:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0
