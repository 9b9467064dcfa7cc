"""Cross attention: to the request's media, computed anew every time; nothing of it is cached."""

from __future__ import annotations

import numpy as np

from ucm_reference.batch import Micro
from ucm_reference.fixed import Array, attend, requantise
from ucm_reference.layers.base import PROJECT, Layer, Place, columns, rows


class CrossAttention(Layer):
    """Each query head has a key and a value head of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        model, row = place.model, self.row
        mine = np.arange(*self.queries())
        self.wq = columns(self.weight("q", model.hidden, row.queries * row.width), mine, row.width)
        self.wo = rows(self.weight("o", row.queries * row.width, model.hidden), mine, row.width)
        pairs = self.weight("kv", model.hidden, row.queries * 2 * row.width)
        self.wkv = columns(pairs, mine, 2 * row.width)

    def run(self, x: Array, micro: Micro) -> Array:
        batch, count, _ = x.shape
        width = self.row.width
        media = np.stack([self.place.model.media(span.media) for span in micro.spans])
        pairs = requantise(media @ self.wkv, PROJECT).reshape(batch, media.shape[1], -1, 2 * width)
        pairs = pairs.swapaxes(1, 2)
        queries = requantise(x @ self.wq, PROJECT).reshape(batch, count, -1, 1, width)
        answer = attend(
            queries.transpose(0, 2, 3, 1, 4),
            pairs[..., :width],
            pairs[..., width:],
            np.zeros(1, np.float32),
            9,
        )  # [B, heads, 1, Q, width]
        flat = answer[:, :, 0].swapaxes(1, 2).reshape(batch, count, -1)
        return np.asarray(flat @ self.wo)
