"""The checked-in trace of real chat requests, and its replay through a real store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ucm_core.store.contract import Geometry, Ids, RunShape, Status
from ucm_core.store.native_store import NativeBlockStore

TRACE = Path(__file__).resolve().parents[2] / "native/tests/data/conversation.trace"
REQUESTS, REFERENCES, DISTINCT = 12_031, 288_500, 182_790
#: Published for this trace: hits of leading blocks when nothing is ever forgotten.
UNLIMITED_HITS = 105_710

GEOMETRY = Geometry(1, 64, 1, RunShape(64), "trace")


def requests(begin: int = 0, end: int = REQUESTS) -> Iterator[list[int]]:
    """Block numbers of each request, in file order."""
    raw = TRACE.read_bytes()
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    for i in range(REQUESTS):
        blocks: list[int] = []
        for _ in range(number()):
            first, length = number(), number()
            blocks.extend(range(first, first + length))
        if i >= end:
            return
        if i >= begin:
            yield blocks


def object_id(block: int) -> bytes:
    return hashlib.sha256(block.to_bytes(8, "little")).digest()[:16]


def unlimited_hits(begin: int = 0, end: int = REQUESTS) -> int:
    """Leading blocks of requests ``[begin, end)`` seen in any request before, by definition."""
    seen: set[int] = set()
    hits = 0
    for i, blocks in enumerate(requests(0, end)):
        for block in blocks if i >= begin else ():
            if block not in seen:
                break
            hits += 1
        seen.update(blocks)
    return hits


def replay(store: NativeBlockStore, begin: int = 0, end: int = REQUESTS) -> int:
    """Look up each request's blocks, then save what is missing; returns the leading hits.

    Saved blocks are durable before the next request, as when requests come one by one.
    """
    memory = np.zeros(64, np.uint8)
    where = np.full((4096, 1), memory.ctypes.data, np.uint64)
    zeros = np.zeros(4096, np.uint32)
    hits = 0
    for blocks in requests(begin, end):
        joined = b"".join(map(object_id, blocks))
        ids: Ids = np.frombuffer(joined, np.uint8).reshape(-1, 16).copy()
        hits += store.lookup_on_prefix(ids) + 1
        new = np.ascontiguousarray(ids[~store.lookup(ids)])
        if len(new):
            task = store.dump(new, zeros[: len(new)], where[: len(new)])
            assert (task.wait_durable() == Status.OK).all()
    return hits
