"""Mamba2: a short convolution, then a decaying state updated token by token."""

from __future__ import annotations

import numpy as np

from ucm_reference.batch import Micro
from ucm_reference.fixed import Array, requantise
from ucm_reference.layers.base import PROJECT, Layer, Place, columns, rows

#: Elements of a head's state per channel.
STATE = 8
_KERNEL = 4


class Mamba2(Layer):
    """A slot holds, per head, the last three inputs and the state ``[STATE, width]``, packed."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        model, row = place.model, self.row
        self.memory = place.memory.of_layer(place.index)
        held = self.held().ravel()
        self.wx = columns(self.weight("x", model.hidden, row.heads * row.width), held, row.width)
        self.wd = columns(self.weight("dt", model.hidden, row.heads), held, 1)
        self.wb = self.weight("b", model.hidden, STATE)
        self.wc = self.weight("c", model.hidden, STATE)
        self.kernel = rows(self.weight("conv", row.heads * row.width, _KERNEL), held, row.width)
        self.wo = rows(self.weight("o", row.heads * row.width, model.hidden), held, row.width)

    def run(self, x: Array, micro: Micro) -> Array:
        batch, count, _ = x.shape
        width, heads = self.row.width, len(self.wd[0])
        _, owners = self.place.memory.local(micro.owners)  # all of them have the same
        slots = self.memory[owners, :, micro.states][:, :, 0]  # [B, R, heads, elements]
        slots = slots.reshape(batch, heads, -1)
        inputs = requantise(x @ self.wx, PROJECT).reshape(batch, count, heads, width)
        past = slots[..., : 3 * width].reshape(batch, heads, 3, width).swapaxes(1, 2)
        line = np.concatenate([past, inputs], axis=1)  # [B, 3 + Q, heads, width]
        kernel = self.kernel.reshape(heads, width, _KERNEL)
        mixed = line[:, :count] * kernel[..., 0]
        for j in range(1, _KERNEL):
            mixed += line[:, j : j + count] * kernel[..., j]
        mixed = requantise(mixed, 2)
        decay = 255 - np.minimum(np.abs(requantise(x @ self.wd, PROJECT)) // 2, 63)
        decay = np.where(micro.valid[..., None], decay / 256, 1).astype(np.float32)
        gate = requantise(x @ self.wb, PROJECT) * micro.valid[..., None]
        update = gate[:, :, None, :, None] * mixed[:, :, :, None, :]
        states = _scan(slots[..., 3 * width :].reshape(batch, heads, STATE, width), decay, update)
        self._keep(states, line, micro)
        reader = requantise(x @ self.wc, PROJECT).astype(np.float64).swapaxes(0, 1)
        read = reader[:, :, None, None] @ states  # [Q, B, heads, 1, width]
        answer = requantise(read[:, :, :, 0], 13).swapaxes(0, 1).reshape(batch, count, -1)
        return np.asarray(answer @ self.wo)

    def _keep(self, states: Array, line: Array, micro: Micro) -> None:
        request, at, slot = micro.writes
        if not len(slot):
            return
        width = self.row.width
        past = line[request[:, None], at[:, None] + 1 + np.arange(3)]  # [n, 3, heads, width]
        packed = np.concatenate(
            [
                past.swapaxes(1, 2).reshape(len(slot), -1, 3 * width),
                states[at, request].reshape(len(slot), -1, STATE * width),
            ],
            axis=-1,
        )
        self.memory[:, :, slot, 0] = packed.reshape(
            len(slot), self.ranks, -1, packed.shape[-1]
        ).swapaxes(0, 1)


def _scan(state: Array, decay: Array, update: Array) -> Array:
    """``float32[Q, B, heads, STATE, width]``: the state after each token."""
    states = np.ascontiguousarray(update.swapaxes(0, 1), np.float32)
    factors = np.ascontiguousarray(decay.swapaxes(0, 1))[..., None, None]
    kept = np.empty_like(state)
    for now, factor in zip(states, factors, strict=True):
        np.multiply(state, factor, out=kept)
        np.floor(kept, out=kept)
        now += kept
        state = now
    return states
