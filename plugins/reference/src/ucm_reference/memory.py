"""The cache memory of a stage's ranks: pages of tokens and slots of states, block 0 and slot 0 null.

Ranks that run in one process lie side by side in one array, so that a layer computes for all of them in
one operation; each rank's part is contiguous memory of its own, which is all that a connector sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ucm_reference.fixed import Array
from ucm_reference.model import PAGED, STATEFUL, LayerRow, Model
from ucm_reference.topology import Rank, Topology

#: What freed memory is filled with where tests ask for it: legal values, all wrong.
POISON = 0x55


@dataclass(frozen=True, slots=True)
class Sizes:
    """Memory of one rank: pages of ``page_tokens`` tokens, pages of each group, slots of states."""

    page_tokens: int = 32
    pages: int = 256
    slots: int = 64


@dataclass(frozen=True, slots=True)
class Tensor:
    """One rank's memory of ``layers`` (global numbers): ``data[block or slot, layer, ...]``."""

    row: str
    layers: tuple[int, ...]
    data: Array


def cell(row: LayerRow) -> tuple[np.dtype[np.void] | np.dtype[np.int8] | np.dtype[np.float32], int]:
    """(element type, elements) of one head of one entry, or of one state."""
    if row.kind == "full":
        return np.dtype(np.int8), 2 * row.width
    if row.kind == "latent":
        return np.dtype(np.int8), row.width + 8
    if row.kind == "indexer":
        return np.dtype(np.int8), row.width
    if row.kind == "compressed":
        return np.dtype(np.int8), row.width + 1  # values, and the exponent of their scale
    if row.kind == "mamba2":
        return np.dtype(np.float32), 3 * row.width + 8 * row.width  # convolution, then state
    return np.dtype(np.float32), row.width * row.width


class Memory:
    """Arrays ``[cp, tp, block, layer of the tensor, entry, head, element]`` of the ranks of one process."""

    def __init__(
        self,
        model: Model,
        topology: Topology,
        stage: range,
        tp_ranks: range,
        sizes: Sizes,
        cp_ranks: range | None = None,
    ) -> None:
        self.sizes = sizes
        self._topology, self._tp_ranks = topology, tp_ranks
        #: Context-parallel ranks of this process; default all.
        self.cp_ranks = range(topology.cp) if cp_ranks is None else cp_ranks
        self._tensors: list[tuple[LayerRow, tuple[int, ...], Array]] = []
        self._of_layer: dict[int, Array] = {}
        self._scratch: dict[int, Array] = {}
        for row in model.rows:
            numbers = [i for i in model.numbers(row.name) if i in stage]
            if row.kind in PAGED | STATEFUL:
                self._add(row, numbers)
            if row.kind == "compressed":
                shape = (
                    len(self.cp_ranks),
                    len(tp_ranks),
                    sizes.slots,
                    2 * row.compression,
                    row.width,
                )
                for number in numbers:
                    self._scratch[number] = np.zeros(shape, np.int8)

    def _add(self, row: LayerRow, numbers: Sequence[int]) -> None:
        first, last = self._topology.heads(row, 0)
        dtype, elements = cell(row)
        paged = row.kind in PAGED
        blocks = self.sizes.pages if paged else self.sizes.slots
        entries = self.sizes.page_tokens // row.compression if paged else 1
        for at in range(0, len(numbers), row.together):
            layers = tuple(numbers[at : at + row.together])
            shape = (
                len(self.cp_ranks), len(self._tp_ranks), blocks, len(layers), entries, last - first,
                elements,
            )  # fmt: skip
            data = np.zeros(shape, dtype)
            self._tensors.append((row, layers, data))
            for i, layer in enumerate(layers):
                self._of_layer[layer] = data[:, :, :, i]

    def local(self, owners: Array) -> tuple[Array, Array]:
        """(bool: which of these context-parallel ranks are here; their places in this memory, else 0)."""
        here = (owners >= self.cp_ranks.start) & (owners < self.cp_ranks.stop)
        return here, np.where(here, owners - self.cp_ranks.start, 0)

    def of_layer(self, layer: int) -> Array:
        """``[cp, tp, block, entry, head, element]`` of one layer, a view."""
        return self._of_layer[layer]

    def scratch(self, layer: int) -> Array:
        """``int8[cp, tp, slot, 2 * compression, width]``: tokens whose entry is not complete yet."""
        return self._scratch[layer]

    def of_rank(self, rank: Rank) -> list[Tensor]:
        """One rank's tensors, by row and layer."""
        cp, tp = self.cp_ranks.index(rank.cp), self._tp_ranks.index(rank.tp)
        return [Tensor(row.name, layers, data[cp, tp]) for row, layers, data in self._tensors]

    def poison(self, row: str, blocks: Sequence[int]) -> None:
        """Overwrite freed blocks, so that whoever still reads them is found out."""
        for owner, _, data in self._tensors:
            if owner.name == row and len(blocks):
                data[:, :, list(blocks)] = np.frombuffer(
                    bytes([POISON]) * data.dtype.itemsize, data.dtype
                )[0]
