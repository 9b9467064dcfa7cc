"""Compressed attention: ``compression`` tokens become one entry of int8 values with a scale.

Queries see the complete entries before them and the tokens of the entry that is still open. Open tokens
lie in a ring of scratch memory that is not cached: a request continues only where none is open.
"""

from __future__ import annotations

import numpy as np

from ucm_reference.batch import Micro, Pages
from ucm_reference.fixed import TOP, Array, attend, requantise
from ucm_reference.layers.base import PROJECT, Layer, Place, columns, read_entries, rows


class CompressedAttention(Layer):
    """One entry serves as key and value of every head, equal on all ranks."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        model, row = place.model, self.row
        self.memory = place.memory.of_layer(place.index)
        self.ring = place.memory.scratch(place.index)
        mine = np.arange(*self.queries())
        self.wq = columns(self.weight("q", model.hidden, row.queries * row.width), mine, row.width)
        self.wo = rows(self.weight("o", row.queries * row.width, model.hidden), mine, row.width)
        self.wkv = self.weight("kv", model.hidden, row.width)
        self.shift = 9 + int(row.compression).bit_length() - 1

    def run(self, x: Array, micro: Micro) -> Array:
        batch, count, _ = x.shape
        size = self.row.compression
        pages = micro.pages(self.row.name, None, size)
        tokens = requantise(x @ self.wkv, PROJECT)
        base = micro.starts // size * size
        raw = self._raw(tokens, micro, base)
        self._close(raw, micro, pages, base)
        found = read_entries(self.place, self.memory, pages)[:, :, 0]
        scale = np.ldexp(np.float32(1), found[..., -1:].astype(np.int32))
        entries = found[..., :-1] * scale  # sums of `size` tokens
        open_tokens = base[:, None] + np.arange(raw.shape[2])
        seen = (open_tokens[:, None] <= micro.positions[..., None]) & (
            open_tokens[:, None] // size == (micro.positions[..., None] + 1) // size
        )
        # A token that completes its entry sees the entry; the open one after it is still empty.
        bias = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None, None]
        keys = np.concatenate([entries, raw * np.float32(size)], axis=2)
        bias = np.concatenate([pages.bias, bias], axis=-1)
        queries = requantise(x @ self.wq, PROJECT)
        queries = queries.reshape(batch, count, self.ranks, -1, self.row.width)
        values = np.rint(keys / size)
        answer = attend(queries.transpose(0, 2, 3, 1, 4), keys, values, bias, self.shift)
        flat = answer.transpose(0, 3, 1, 2, 4).reshape(batch, count, -1)
        return np.asarray(flat @ self.wo)

    def _raw(self, tokens: Array, micro: Micro, base: Array) -> Array:
        """``float32[B, R, C + Q, w]``: the tokens from ``base`` on, older ones out of the ring."""
        size = self.row.compression
        batch, count, width = tokens.shape
        raw = np.zeros((batch, self.ranks, size + count, width), np.float32)
        ring_at = (base[:, None] + np.arange(size)) % (2 * size)
        _, owners = self.place.memory.local(micro.owners)  # all of them have the same
        older = self.ring[owners, :, micro.scratch]  # [B, R, 2C, w]
        raw[:, :, :size] = np.take_along_axis(older, ring_at[:, None, :, None], axis=2)
        into = (micro.starts - base)[:, None] + np.arange(count)
        request, at = np.nonzero(micro.valid)
        raw[request, :, into[request, at]] = tokens[request, at][:, None]
        # Only the last C tokens matter, and two of them would claim one place of the ring.
        kept = micro.valid & (np.arange(count) >= (micro.counts - 2 * size)[:, None])
        request, at = np.nonzero(kept)
        where = micro.positions[request, at] % (2 * size)
        self.ring[:, :, micro.scratch[request], where] = tokens[request, at].astype(np.int8)
        return raw

    def _close(self, raw: Array, micro: Micro, pages: Pages, base: Array) -> None:
        """Write the entries that these tokens complete."""
        size = self.row.compression
        whole = raw.shape[2] // size
        sums = raw[:, :, : whole * size].reshape(*raw.shape[:2], whole, size, -1).sum(axis=3)
        ends = base[:, None] + (np.arange(whole) + 1) * size
        request, at = np.nonzero(ends <= (micro.starts + micro.counts)[:, None])
        if not len(request):
            return
        entries = sums[request, :, at]  # [n, R, w]
        _, exponent = np.frexp(np.abs(entries).max(axis=-1, keepdims=True) / (TOP + 1))
        exponent = np.maximum(exponent, 0)
        values = np.clip(np.rint(np.ldexp(entries, -exponent)), -TOP, TOP)
        packed = np.concatenate([values, exponent], axis=-1)[:, :, None].astype(np.int8)
        last = ends[request, at] - 1
        tables = [np.asarray(span.tables[self.row.name]) for span in micro.spans]
        page = np.array(
            [tables[b][p // micro.page_tokens] for b, p in zip(request, last, strict=True)]
        )
        owner = last // micro.topology.segment % micro.topology.cp
        here, owner = self.place.memory.local(owner)
        at = last % micro.page_tokens // size
        self.memory[owner[here], :, page[here], at[here]] = packed[here]
