"""What one step computes: spans of requests, and their padded batches with masks and addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ucm_reference.fixed import Array
from ucm_reference.topology import Topology


@dataclass(slots=True)
class Span:
    """Consecutive tokens of one request that one step computes.

    ``tokens``: ``int64[n]``, drafts last. ``tables``: group -> pages from token 0 on, 0 where freed.
    ``state``: slot to continue from, 0 for a fresh start. ``writes``: (i, slot): the state after token i of
    the span goes there. ``scratch``: slot of the request's open entries. ``sample``: how many of the last
    tokens need an answer.
    """

    request_id: str
    start: int
    tokens: Array
    tables: Mapping[str, Array]
    state: int = 0
    writes: Sequence[tuple[int, int]] = ()
    scratch: int = 0
    media: int = 0
    sample: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class Pages:
    """One group's pages as a micro-batch sees them, ``B`` requests by ``S`` keys.

    ``table``, ``owner``: ``[B, pages]``. ``keys``: ``[B, S]`` positions. ``bias``:
    ``float32[B, 1, 1, Q, S]``. ``write``: (owner, page, offset) of each valid token, ``[T]`` each.
    """

    table: Array
    owner: Array
    keys: Array
    bias: Array
    write: tuple[Array, Array, Array]


@dataclass(slots=True)
class Micro:
    """Spans of similar length, padded: ``tokens``, ``positions``, ``valid`` are ``[B, Q]``.

    Padding repeats a request's last position; what it computes is thrown away. ``selected``: what the
    last indexer chose, ``float32[B, 1, 1, Q, S]`` of 0 and -inf, or None.
    """

    spans: list[Span]
    topology: Topology
    page_tokens: int
    tokens: Array = field(init=False)
    positions: Array = field(init=False)
    valid: Array = field(init=False)
    starts: Array = field(init=False)
    counts: Array = field(init=False)
    owners: Array = field(init=False)
    states: Array = field(init=False)
    writes: Array = field(init=False)
    scratch: Array = field(init=False)
    selected: Array | None = None
    _pages: dict[tuple[str, int | None, int], Pages] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.starts = np.array([span.start for span in self.spans])
        self.counts = np.array([len(span.tokens) for span in self.spans])
        at = np.arange(int(self.counts.max()))
        self.valid = at < self.counts[:, None]
        self.positions = self.starts[:, None] + np.minimum(at, self.counts[:, None] - 1)
        self.tokens = np.zeros(self.valid.shape, np.int64)
        for row, span in zip(self.tokens, self.spans, strict=True):
            row[: len(span.tokens)] = span.tokens
        segment, cp = self.topology.segment, self.topology.cp
        self.owners = self.starts // segment % cp
        self.states = np.array([span.state for span in self.spans])
        self.scratch = np.array([span.scratch for span in self.spans])
        #: ``[3, n]``: request, token and slot of every state to be kept.
        self.writes = np.array(
            [(b, i, slot) for b, span in enumerate(self.spans) for i, slot in span.writes], np.int64
        ).reshape(-1, 3).T  # fmt: skip

    def pages(self, group: str, window: int | None, compression: int = 1) -> Pages:
        """``group``'s pages for these spans; computed once for all layers of a row."""
        key = (group, window, compression)
        if key not in self._pages:
            self._pages[key] = self._build(group, window, compression)
        return self._pages[key]

    def _build(self, group: str, window: int | None, compression: int) -> Pages:
        size = self.page_tokens
        ends = self.starts + self.counts
        first = np.zeros_like(self.starts)
        if window is not None:
            first = np.maximum(self.starts - window + 1, 0) // size
        count = int((-(-ends // size) - first).max())
        columns = first[:, None] + np.arange(count)
        tables = [np.asarray(span.tables[group], np.int64) for span in self.spans]
        full = np.zeros((len(tables), int(columns.max()) + 1), np.int64)
        for row, table in zip(full, tables, strict=True):
            n = min(len(table), len(row))
            row[:n] = table[:n]
        table = np.take_along_axis(full, columns, axis=1)
        owner = columns * size // self.topology.segment % self.topology.cp
        entries = size // compression
        keys = (columns[:, :, None] * entries + np.arange(entries)).reshape(len(tables), -1)
        ends_at = (keys + 1) * compression - 1  # the token that completes the entry
        seen = ends_at[:, None, :] <= self.positions[:, :, None]
        if window is not None:
            seen &= keys[:, None, :] > self.positions[:, :, None] - window
        bias = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None, None]
        request, _ = np.nonzero(self.valid)
        where = self.positions[self.valid]
        page = full[request, where // size]
        if not page.all():
            raise RuntimeError(f"group {group!r}: a token is computed that has no page")
        write = (where // self.topology.segment % self.topology.cp, page, where % size)
        return Pages(table, owner, keys, bias, write)


def micros(spans: Sequence[Span], topology: Topology, page_tokens: int, short: int) -> list[Micro]:
    """Long spans (prefill) and short ones (decode, drafts) as batches of their own."""
    parts = (
        [span for span in spans if len(span.tokens) > short],
        [span for span in spans if len(span.tokens) <= short],
    )
    return [Micro(part, topology, page_tokens) for part in parts if part]
