"""Attention over pages: MHA and GQA (also sliding and shared), and MLA over a latent."""

from __future__ import annotations

import numpy as np

from ucm_reference.batch import Micro
from ucm_reference.fixed import Array, attend, requantise, rotate, rotation
from ucm_reference.layers.base import (
    PROJECT,
    Layer,
    Place,
    columns,
    read_entries,
    rows,
    write_entries,
)

_ROPE = 8


class FullAttention(Layer):
    """Keys and values of every head; a ``shared`` row reads the pages of an earlier layer."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        row, model = self.row, place.model
        source = place.index
        self.owns = row.kind != "shared"
        if not self.owns:
            source = model.source_layer(place.index)
        self.source = model.layers[source]
        self.memory = place.memory.of_layer(source)
        width, kv_heads = self.source.width, self.source.heads
        self.width = width
        first, last = self.queries()
        mine = np.arange(first, last)
        self.per_kv = max(1, row.queries // max(kv_heads, place.topology.tp))
        self.wq = columns(self.weight("q", model.hidden, row.queries * width), mine, width)
        self.wo = rows(self.weight("o", row.queries * width, model.hidden), mine, width)
        if self.owns:
            held = self.held().ravel()
            pairs = self.weight("kv", model.hidden, kv_heads * 2 * width)
            self.wkv = columns(pairs, held, 2 * width)
        self.cosines, self.sines = rotation(model.max_tokens, width)

    def run(self, x: Array, micro: Micro) -> Array:
        batch, count, _ = x.shape
        pages = micro.pages(self.source.name, self.source.window)
        cosines = self.cosines[micro.positions][:, :, None]
        sines = self.sines[micro.positions][:, :, None]
        queries = requantise(x @ self.wq, PROJECT).reshape(batch, count, -1, self.width)
        queries = rotate(queries, cosines, sines)
        queries = queries.reshape(batch, count, self.ranks, -1, self.per_kv, self.width)
        if self.owns:
            pairs = requantise(x @ self.wkv, PROJECT).reshape(batch, count, -1, 2 * self.width)
            keys = rotate(pairs[..., : self.width], cosines, sines)
            pairs = np.concatenate([keys, pairs[..., self.width :]], axis=-1)
            entries = pairs[micro.valid].reshape(
                -1, self.ranks, self.memory.shape[-2], 2 * self.width
            )
            write_entries(self.place, self.memory, pages, entries)
        found = read_entries(self.place, self.memory, pages).astype(np.float32)
        answer = attend(
            queries.transpose(0, 2, 3, 4, 1, 5),
            found[..., : self.width],
            found[..., self.width :],
            pages.bias[:, None],
            9,
        )  # [B, R, kv heads, queries of each, Q, width]
        flat = answer.transpose(0, 4, 1, 2, 3, 5).reshape(batch, count, -1)
        return np.asarray(flat @ self.wo)


class LatentAttention(Layer):
    """MLA: one latent and one rotary key a token, equal on all ranks; queries are absorbed into it."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        model, row = place.model, self.row
        self.memory = place.memory.of_layer(place.index)
        self.width = row.width + _ROPE
        first, last = self.queries()
        mine = np.arange(first, last)
        self.wq = columns(
            self.weight("q", model.hidden, row.queries * self.width), mine, self.width
        )
        self.wo = rows(self.weight("o", row.queries * row.width, model.hidden), mine, row.width)
        self.wkv = self.weight("kv", model.hidden, self.width)
        self.cosines, self.sines = rotation(model.max_tokens, _ROPE)

    def run(self, x: Array, micro: Micro) -> Array:
        batch, count, _ = x.shape
        pages = micro.pages(self.row.name, None)
        cosines, sines = self.cosines[micro.positions], self.sines[micro.positions]
        queries = requantise(x @ self.wq, PROJECT).reshape(batch, count, -1, self.width)
        queries = self._turned(queries, cosines[:, :, None], sines[:, :, None])
        queries = queries.reshape(batch, count, self.ranks, -1, self.width)
        entry = self._turned(requantise(x @ self.wkv, PROJECT), cosines, sines)[micro.valid]
        copies = np.broadcast_to(entry[:, None, None], (len(entry), self.ranks, 1, self.width))
        write_entries(self.place, self.memory, pages, copies)
        found = read_entries(self.place, self.memory, pages)[:, :, 0].astype(np.float32)
        bias = pages.bias if micro.selected is None else pages.bias + micro.selected
        answer = attend(
            queries.transpose(0, 2, 3, 1, 4), found, found[..., : self.row.width], bias, 9
        )  # [B, R, heads, Q, latent]
        flat = answer.transpose(0, 3, 1, 2, 4).reshape(batch, count, -1)
        return np.asarray(flat @ self.wo)

    def _turned(self, vectors: Array, cosines: Array, sines: Array) -> Array:
        latent = vectors[..., : self.row.width]
        return np.concatenate(
            [latent, rotate(vectors[..., self.row.width :], cosines, sines)], axis=-1
        )
