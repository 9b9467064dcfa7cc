"""The delta rule (KDA: a decay per key channel, GDN: one per head): the state forgets what it corrects."""

from __future__ import annotations

import numpy as np

from ucm_reference.batch import Micro
from ucm_reference.fixed import Array, normalise, requantise
from ucm_reference.layers.base import PROJECT, Layer, Place, columns, rows


class DeltaRule(Layer):
    """A slot holds the state ``[width (keys), width (values)]`` of each head."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        model, row = place.model, self.row
        self.memory = place.memory.of_layer(place.index)
        held = self.held().ravel()
        inner = row.heads * row.width
        self.wqkv = [columns(self.weight(n, model.hidden, inner), held, row.width) for n in "qkv"]
        channels = row.width if row.kind == "kda" else 1
        self.wd = columns(self.weight("decay", model.hidden, row.heads * channels), held, channels)
        self.wb = columns(self.weight("beta", model.hidden, row.heads), held, 1)
        self.wo = rows(self.weight("o", inner, model.hidden), held, row.width)

    def run(self, x: Array, micro: Micro) -> Array:
        batch, count, _ = x.shape
        width, heads = self.row.width, len(self.wb[0])
        _, owners = self.place.memory.local(micro.owners)  # all of them have the same
        slots = self.memory[owners, :, micro.states][:, :, 0]
        state = slots.reshape(batch, heads, width, width).astype(np.float64)
        query, key, value = (
            requantise(x @ w, PROJECT).reshape(batch, count, heads, width).astype(np.float64)
            for w in self.wqkv
        )
        query, key = normalise(query).astype(np.float64), normalise(key).astype(np.float64)
        valid = micro.valid[..., None, None]
        decay = 255 - np.minimum(np.abs(requantise(x @ self.wd, PROJECT)) // 2, 63)
        decay = np.where(valid, decay.reshape(batch, count, heads, -1) / 256, 1.0)
        beta = (requantise(x @ self.wb, PROJECT).reshape(batch, count, heads, 1) + 128) / 256
        states = _scan(state, key * valid, value * 256, decay, beta)
        self._keep(states, micro)
        read = query.swapaxes(0, 1)[..., None, :] @ states
        answer = requantise(read[..., 0, :], 8).swapaxes(0, 1).reshape(batch, count, -1)
        return np.asarray(answer @ self.wo)

    def _keep(self, states: Array, micro: Micro) -> None:
        request, at, slot = micro.writes
        if not len(slot):
            return
        kept = states[at, request].reshape(len(slot), self.ranks, -1, self.row.width**2)
        self.memory[:, :, slot, 0] = kept.swapaxes(0, 1)


def _scan(state: Array, key: Array, value: Array, decay: Array, beta: Array) -> Array:
    """``float64[Q, B, heads, width, width]``: the state after each token; integers throughout."""
    keys, values = key.swapaxes(0, 1), value.swapaxes(0, 1)
    decays, betas = decay.swapaxes(0, 1)[..., None], beta.swapaxes(0, 1)
    states = np.empty((keys.shape[0], *state.shape))
    for now, k, v, factor, rate in zip(states, keys, values, decays, betas, strict=True):
        np.multiply(state, factor, out=now)
        np.floor(now, out=now)
        error = v - (k[..., None, :] @ now)[..., 0, :]
        error *= rate
        np.rint(error, out=error)
        change = k[..., :, None] * error[..., None, :]
        change *= 2.0**-13
        now += np.rint(change, out=change)
        state = now
    return states
