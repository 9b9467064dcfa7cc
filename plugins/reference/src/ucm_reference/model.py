"""A model is rows of a table: how many layers of which kind, and their shape."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ucm_reference.fixed import Array

#: Kinds of layers, by how their cache grows: pages of tokens, one state, nothing.
PAGED = frozenset({"full", "latent", "compressed", "indexer"})
STATEFUL = frozenset({"mamba2", "kda", "gdn"})
BARE = frozenset({"cross", "shared"})


@dataclass(frozen=True, slots=True)
class LayerRow:
    """``layers`` layers of one kind, spread evenly over the model.

    ``kind``: ``full`` (MHA, GQA; ``window``: sliding), ``latent`` (MLA), ``compressed`` (``compression``
    tokens an entry, int8 values and a scale), ``indexer`` (chooses the ``top`` keys that the layers of
    ``follows`` attend to), ``mamba2``, ``kda``, ``gdn``, ``cross`` (attends to the request's media),
    ``shared`` (attends to the cache of the layer of ``follows`` before it).
    ``heads``: kv or state heads of a layer; ``queries``: query heads; ``width``: elements of a head, or of
    the latent. ``grid``: tokens between possible checkpoints; ``interval``: tokens between periodic
    ones. ``together``: layers that lie in one tensor. ``store``: which store instance holds the row.
    """

    name: str
    kind: str
    layers: int
    heads: int = 8
    queries: int = 8
    width: int = 16
    window: int | None = None
    compression: int = 1
    grid: int = 64
    interval: int | None = None
    together: int = 1
    top: int = 0
    follows: str | None = None
    store: str = ""

    def __post_init__(self) -> None:
        if self.kind not in PAGED | STATEFUL | BARE:
            raise ValueError(
                f"row {self.name!r}: unknown kind {self.kind!r}; known are "
                f"{sorted(PAGED | STATEFUL | BARE)}"
            )
        if (self.kind in ("indexer", "shared")) is not (self.follows is not None):
            raise ValueError(f"row {self.name!r}: only indexer and shared rows follow another row")


@dataclass(frozen=True)
class Model:
    """``rows`` and sizes. ``draft``: tokens that speculation may propose at once at most."""

    name: str
    rows: tuple[LayerRow, ...]
    hidden: int = 32
    vocabulary: int = 509
    seed: int = 1
    max_tokens: int = 8192

    def row(self, name: str) -> LayerRow:
        return next(row for row in self.rows if row.name == name)

    @cached_property
    def layers(self) -> tuple[LayerRow, ...]:
        """The row of each layer: rows interleaved evenly, as such models do."""
        placed = sorted(
            (i / row.layers, at, row.name)
            for at, row in enumerate(self.rows)
            for i in range(row.layers)
        )
        by_name: Mapping[str, LayerRow] = {row.name: row for row in self.rows}
        return tuple(by_name[name] for _, _, name in placed)

    def numbers(self, row: str) -> tuple[int, ...]:
        """Layer numbers of a row, ascending."""
        return tuple(i for i, owner in enumerate(self.layers) if owner.name == row)

    def source_layer(self, index: int) -> int:
        """The layer whose cache the ``shared`` layer ``index`` attends to: the last one before it."""
        source = self.layers[index].follows
        before = [i for i in self.numbers(source or "") if i < index]
        if not before:
            raise ValueError(f"layer {index} shares the cache of {source!r}, which comes later")
        return before[-1]

    @property
    def alignment(self) -> int:
        """Positions from which a request can continue: no compressed entry may be open there."""
        return int(np.lcm.reduce([row.compression for row in self.rows], initial=1))

    def weight(self, index: int, name: str, *shape: int) -> Array:
        """``float32`` integers in [-3, 3], the same in every process."""
        seed = (self.seed, index + 1, zlib.crc32(name.encode()))
        return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)

    def embedding(self) -> Array:
        """``float64[vocabulary, hidden]``."""
        rng = np.random.default_rng((self.seed, 0, 0))
        return rng.integers(-64, 65, (self.vocabulary, self.hidden)).astype(np.float64)

    def media(self, number: int, rows: int = 4) -> Array:
        """``float32[rows, hidden]``: what cross attention sees of the item ``number``."""
        rng = np.random.default_rng((self.seed, 1, number))
        return rng.integers(-64, 65, (rows, self.hidden)).astype(np.float32)
