"""What every layer knows, and the arithmetic that several share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ucm_reference.batch import Micro, Pages
from ucm_reference.fixed import Array
from ucm_reference.memory import Memory
from ucm_reference.model import LayerRow, Model
from ucm_reference.topology import Topology

#: Sums of 32 products of an activation and a weight, as activations again.
PROJECT = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A layer's number and the tensor-parallel ranks of this process that compute it. ``join``: what every
    context-parallel rank found in its own pages (zeros elsewhere) -> what all of them have."""

    model: Model
    index: int
    topology: Topology
    tp_ranks: range
    memory: Memory
    join: Callable[[Array], Array] = lambda found: found

    @property
    def row(self) -> LayerRow:
        return self.model.layers[self.index]


class Layer(ABC):
    """Computes for all local ranks at once; arrays have ``R`` local tensor-parallel ranks.

    ``run`` takes normalised activations ``float32[B, Q, hidden]`` and returns this process's part of the
    sum over ranks, ``[B, Q, hidden]`` exact integers, or None for a layer that adds nothing.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.row = place.row
        self.ranks = len(place.tp_ranks)

    @abstractmethod
    def run(self, x: Array, micro: Micro) -> Array | None: ...

    def weight(self, name: str, *shape: int) -> Array:
        return self.place.model.weight(self.place.index, name, *shape)

    def held(self) -> Array:
        """``int64[R, n]``: global kv or state heads of each local rank."""
        topology, row = self.place.topology, self.row
        return np.array([range(*topology.heads(row, tp)) for tp in self.place.tp_ranks])

    def queries(self) -> tuple[int, int]:
        """Global query heads ``[a, b)`` of the local ranks."""
        each = self.row.queries // self.place.topology.tp
        ranks = self.place.tp_ranks
        return ranks.start * each, ranks.stop * each


def columns(weight: Array, heads: Sequence[int] | Array, width: int) -> Array:
    """The columns of ``heads`` out of ``[hidden, all heads * width]``."""
    split = weight.reshape(weight.shape[0], -1, width)
    return np.ascontiguousarray(split[:, np.asarray(heads)].reshape(weight.shape[0], -1))


def rows(weight: Array, heads: Sequence[int] | Array, width: int) -> Array:
    """The rows of ``heads`` out of ``[all heads * width, hidden]``."""
    split = weight.reshape(-1, width, weight.shape[-1])
    return np.ascontiguousarray(split[np.asarray(heads)].reshape(-1, weight.shape[-1]))


def write_entries(place: Place, memory: Array, pages: Pages, entries: Array) -> None:
    """Put ``[T, R, heads, elements]`` of the valid tokens where the pages say, on the ranks that own them."""
    owner, page, offset = pages.write
    here, owner = place.memory.local(owner)
    memory[owner[here], :, page[here], offset[here]] = entries[here].astype(np.int8)


def read_entries(place: Place, memory: Array, pages: Pages) -> Array:
    """``int8[B, R, heads, S, elements]``: every page of the batch, each from the rank that owns it."""
    here, owner = place.memory.local(pages.owner)
    found: Array = memory[owner, :, pages.table]  # [B, pages, R, entries, heads, elements]
    if not here.all():
        found[~np.broadcast_to(here, found.shape[:2])] = 0
    found = place.join(found)
    batch, count, ranks, entries, heads, elements = found.shape
    found = found.transpose(0, 2, 4, 1, 3, 5)
    return found.reshape(batch, ranks, heads, count * entries, elements)
