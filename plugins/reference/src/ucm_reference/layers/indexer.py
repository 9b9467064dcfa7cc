"""Sparse indexer: small keys of its own choose which keys the latent layers after it attend to.

Its keys lie in the pages of its source group, block for block: a sidecar.
"""

from __future__ import annotations

import numpy as np

from ucm_reference.batch import Micro
from ucm_reference.fixed import Array, requantise
from ucm_reference.layers.base import PROJECT, Layer, Place, read_entries, write_entries

#: Positions below this break ties between equal scores.
_POSITIONS = 2**14


class Indexer(Layer):
    """Adds nothing to the activations; leaves ``micro.selected`` for the layers that follow."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        model, row = place.model, self.row
        self.memory = place.memory.of_layer(place.index)
        self.wq = self.weight("q", model.hidden, row.width)
        self.wk = self.weight("k", model.hidden, row.width)

    def run(self, x: Array, micro: Micro) -> None:
        pages = micro.pages(self.row.follows or "", None)
        keys = requantise(x @ self.wk, PROJECT)[micro.valid]
        shape = (len(keys), self.ranks, 1, self.row.width)
        write_entries(self.place, self.memory, pages, np.broadcast_to(keys[:, None, None], shape))
        # The ranks' copies are equal; scoring against their mean makes a wrong one show.
        found = read_entries(self.place, self.memory, pages)[:, :, 0].mean(axis=1, dtype=np.float64)
        queries = requantise(x @ self.wq, PROJECT).astype(np.float64)
        scores = queries @ found.swapaxes(-1, -2)  # [B, Q, S]
        seen = pages.bias[:, 0, 0]
        scores = scores * _POSITIONS + pages.keys[:, None, :] + seen
        top = self.row.top
        if scores.shape[-1] <= top:
            micro.selected = np.zeros_like(pages.bias)
            return
        least = np.partition(scores, -top, axis=-1)[..., -top][..., None]
        chosen = np.where(scores >= least, np.float32(0), np.float32(-np.inf))
        micro.selected = chosen[:, None, None]
