"""Where a rank's objects lie: coordinates of the spec table, shards, and addresses in its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.adapter.unit_map import LayerKey, UnitMap
from ucm_core.errors import UnsupportedError
from ucm_core.identity import ModelIdentity
from ucm_core.spec import (
    STORED,
    TARGET,
    GroupSpec,
    KeySpace,
    Kind,
    RankRule,
    SeededCoordinate,
    SpecTable,
)
from ucm_core.spec.unit import UnitSpec, object_shape
from ucm_core.store.contract import Addresses, Geometry, RunShape
from ucm_reference.memory import Sizes, Tensor
from ucm_reference.model import Model
from ucm_reference.topology import Rank, Topology


@dataclass(frozen=True, slots=True)
class Placement:
    """The same on every rank and in the scheduler. Raises UnsupportedError for what cannot be cut."""

    model: Model
    topology: Topology
    page_tokens: int
    table: SpecTable
    keys: KeySpace

    @classmethod
    def build(
        cls,
        model: Model,
        topology: Topology,
        sizes: Sizes,
        table: SpecTable,
        identity: ModelIdentity,
        slices: int,
    ) -> Placement:
        for row in table.chains:
            if row.block_tokens % sizes.page_tokens or topology.segment % row.block_tokens:
                raise UnsupportedError(
                    f"row {row.name!r}: a stored block of {row.block_tokens} tokens must be whole pages "
                    f"of {sizes.page_tokens} and lie within a segment of {topology.segment}"
                )
        stages = {TARGET: topology.stages(model)}
        keys = KeySpace(table, identity, stages=stages, slices=slices)
        return cls(model, topology, sizes.page_tokens, table, keys)

    def pieces(self, row: GroupSpec) -> int:
        """Pages of one stored block; a state is one piece."""
        return 1 if row.kind is Kind.SNAPSHOT else row.block_tokens // self.page_tokens

    def unit_map(self, stage: range) -> UnitMap:
        """What the calls of a stage's layers mean, from the tensors that this engine makes of its rows."""
        joined = []
        for row in self.model.rows:
            if row.together > 1:
                numbers = [LayerKey(TARGET, i) for i in self.model.numbers(row.name) if i in stage]
                starts = range(0, len(numbers), row.together)
                tensors = [numbers[at : at + row.together] for at in starts]
                joined += [tensor for tensor in tensors if len(tensor) > 1]
        return UnitMap(self.table, {TARGET: stage}, tensors=joined)

    def units(self, stage: range, row: str) -> tuple[UnitSpec, ...]:
        """Units of a row on a stage."""
        return self.unit_map(stage).by_row.get(row, ())

    def copies(self, row: GroupSpec) -> int:
        """Ranks that hold the same content of a row's object: any of them can write it."""
        return _replica(row, Rank(0, 0, 0), self.topology)[1]

    def geometry(self, at: SeededCoordinate) -> Geometry:
        """Shards are the tensors' greatest common number of layers; runs are pages of one of them."""
        row, (first, last) = at.row, at.coordinate.heads
        stage = range(min(at.coordinate.layers), max(at.coordinate.layers) + 1)
        shape = object_shape(self.units(stage, row.name))
        pieces = self.pieces(row)
        shard = shape.shard_bytes(row) * (last - first) // row.heads
        tag = f"opaque.{row.role or 'kv'}" + (f".{shape.packing}" if shape.packing else "")
        axes = f"layer:{shape.shard_count},token:{pieces},elem:{shard // pieces}"
        return Geometry(
            shape.shard_count,
            shard,
            pieces,
            RunShape(shard // pieces),
            str(LayoutDescriptor.parse(f"{tag}|{axes}")),
        )

    def store_name(self, at: SeededCoordinate) -> str:
        """Objects of one shape share a store: a row's coordinates of equal layer count."""
        return f"{at.row.store}/{at.row.name}/{len(at.coordinate.layers)}"

    def everything(self) -> list[SeededCoordinate]:
        return [
            at for row in self.table.rows if row.kind in STORED for at in self.keys.of(row.name)
        ]


@dataclass(frozen=True, slots=True)
class Lane:
    """One coordinate that a rank holds. ``bases``, ``strides``: ``uint64[shards]``, address of block 0 and
    bytes between blocks. ``replica`` of ``replicas``: ranks with the same content, in the order in which
    they are elected to write."""

    at: SeededCoordinate
    store: str
    pieces: int
    bases: npt.NDArray[np.uint64]
    strides: npt.NDArray[np.uint64]
    replica: int
    replicas: int

    @property
    def shards(self) -> int:
        return len(self.bases)

    def addresses(self, pages: npt.NDArray[np.int64]) -> Addresses:
        """``uint64[N * shards, pieces]`` for ``pages[N, pieces]``; 0 where there is no page."""
        numbers = pages.astype(np.uint64)[:, None, :]
        out = self.bases[None, :, None] + numbers * self.strides[None, :, None]
        out[np.broadcast_to(numbers == 0, out.shape)] = 0
        return np.ascontiguousarray(out.reshape(len(pages) * self.shards, self.pieces))


def lanes(placement: Placement, rank: Rank, tensors: Sequence[Tensor]) -> list[Lane]:
    """Everything that ``rank`` loads and saves; ``tensors``: its registered memory."""
    topology, stage = placement.topology, placement.topology.stages(placement.model)[rank.pp]
    made = []
    for row in placement.table.rows:
        if row.kind not in STORED:
            continue
        mine = {tensor.layers: tensor for tensor in tensors if tensor.row == row.name}
        if not mine:
            continue
        heads = topology.heads(placement.model.row(row.name), rank.tp)
        found = [
            at
            for at in placement.keys.of(row.name)
            if at.coordinate.layers[0] in stage and at.coordinate.heads == heads
        ]
        if len(found) != 1:
            raise UnsupportedError(
                f"row {row.name!r}: the namespace cuts heads differently than tp={topology.tp}; use "
                "one whose head_slices is the tensor-parallel size"
            )
        at = found[0]
        geometry = placement.geometry(at)
        bases, strides = [], []
        for unit in placement.units(stage, row.name):
            data = mine[unit.layers].data
            for i in range(unit.shards):
                bases.append(data.ctypes.data + i * (data.strides[0] // unit.shards))
                strides.append(data.strides[0])
        replica, replicas = _replica(row, rank, topology)
        made.append(
            Lane(
                at,
                placement.store_name(at),
                geometry.runs_per_shard,
                np.array(bases, np.uint64),
                np.array(strides, np.uint64),
                replica,
                replicas,
            )
        )
    return made


def _replica(row: GroupSpec, rank: Rank, topology: Topology) -> tuple[int, int]:
    """Chain content is equal on tensor-parallel copies, states on context-parallel ranks as well."""
    copies = topology.tp if row.rank_rule is RankRule.UNION else max(1, topology.tp // row.heads)
    if row.kind is not Kind.SNAPSHOT:
        return rank.tp % copies, copies
    return rank.cp * copies + rank.tp % copies, copies * topology.cp
