"""Fixed-point arithmetic: every value is an integer, every sum is exact.

Activations are integers in [-127, 127] and weights in [-3, 3], held in floats. A product sum stays below
2**24 (float32) or 2**53 (float64), so it is the same number in whatever order BLAS, a chunk, a batch or a
set of ranks adds it. Rounding happens only element by element, on exact sums, with operations that IEEE 754
rounds correctly. So the result for a token depends on nothing but its prefix: two runs are equal bit
by bit, or something is wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Largest activation; keys, values and latents fit an int8.
TOP = 127
#: Root mean square that ``normalise`` gives.
RMS = 32
#: Softmax weights are 2**(-i / 16) in units of 1/255, zero from 8 octaves below the maximum on.
_WEIGHTS = np.rint(255 * 2.0 ** (-np.arange(256) / 16)).astype(np.float32)
_WEIGHTS[128:] = 0
#: Keys whose weighted sum of values is exact in float32.
_SINGLE = 2**24 // (255 * TOP)


def normalise(hidden: Array) -> Array:
    """``float64[..., d]`` integers below 2**20 -> ``float32[..., d]`` integers of mean square RMS**2."""
    power = np.einsum("...d,...d->...", hidden, hidden) / hidden.shape[-1]
    scale = RMS / np.sqrt(np.maximum(power, 1.0))
    scaled: Array = np.rint(hidden * scale[..., None])
    np.clip(scaled, -TOP, TOP, out=scaled)
    return scaled.astype(np.float32)


def requantise(sums: Array, shift: int) -> Array:
    """Exact sums divided by ``2**shift``, rounded and clipped to activations (``float32``)."""
    scaled = sums * 2.0**-shift
    np.rint(scaled, out=scaled)
    np.clip(scaled, -TOP, TOP, out=scaled)
    return scaled.astype(np.float32, copy=False)


def attend(queries: Array, keys: Array, values: Array, bias: Array, shift: int) -> Array:
    """Softmax attention in base 2, exact.

    ``queries``: ``float32[*, G, Q, w]``, ``keys``: ``float32[*, S, w]``, ``values``: ``float32[*, S, v]``,
    ``bias``: 0 or -inf, broadcastable to ``[*, G, Q, S]``. A score counts ``2**-shift`` sixteenths of an
    octave. Returns ``float32[*, G, Q, v]`` integers. Every query must see a key.
    """
    *lead, groups, count, width = queries.shape
    scores = queries.reshape(*lead, groups * count, width) @ keys.swapaxes(-1, -2)
    scores = scores.reshape(*lead, groups, count, -1)
    scores += bias
    below = scores.max(axis=-1, keepdims=True) - scores
    below *= 2.0**-shift
    np.minimum(below, 255.0, out=below)
    weights = np.take(_WEIGHTS, below.astype(np.uint8))
    total = weights.sum(axis=-1, dtype=np.float64)
    flat = weights.reshape(*lead, groups * count, -1)
    if flat.shape[-1] > _SINGLE:
        summed = flat.astype(np.float64) @ values.astype(np.float64)
    else:
        summed = (flat @ values).astype(np.float64)
    summed = summed.reshape(*lead, groups, count, -1)
    mean: Array = np.rint(summed / total[..., None])
    return mean.astype(np.float32)


def rotation(length: int, width: int) -> tuple[Array, Array]:
    """Rotary tables ``float32[length, width / 2]`` of cosines and sines in units of 1/64."""
    half = width // 2
    angles = np.arange(length)[:, None] * 100.0 ** (-np.arange(half) / half)
    cosines, sines = (np.rint(64 * f(angles)).astype(np.float32) for f in (np.cos, np.sin))
    return cosines, sines


def rotate(vectors: Array, cosines: Array, sines: Array) -> Array:
    """Rotary embedding of ``[..., w]`` by tables ``[..., w / 2]`` that broadcast against it."""
    half = vectors.shape[-1] // 2
    a, b = vectors[..., :half], vectors[..., half:]
    turned = np.concatenate([a * cosines - b * sines, a * sines + b * cosines], axis=-1)
    return requantise(turned, 6)
