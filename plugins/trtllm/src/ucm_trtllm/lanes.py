"""One coordinate that a rank holds: where its bytes are in the pages, in the arena, and in which store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.adapter.blocks import PageMap
from ucm_core.adapter.transfer import BlockTransfer
from ucm_core.identity import object_ids
from ucm_core.store.contract import Addresses, BlockStore
from ucm_core.store.native_store import native_geometry
from ucm_trtllm.arena import Arena
from ucm_trtllm.deployment import Deployment
from ucm_trtllm.messages import Op, RowPart


@dataclass(frozen=True, slots=True)
class Lane:
    """``inside``: bytes of the coordinate's object into a slot of its row. ``replica`` of ``replicas``: ranks
    with the same content, in the order in which they are elected to write."""

    row: int
    name: str
    seed: bytes
    store: BlockStore
    pages: PageMap
    geometry: _native.Geometry
    shard_bytes: int
    inside: int
    windowed: bool
    replica: int
    replicas: int

    def addresses(self, part: RowPart, begin: int, end: int | None) -> Addresses:
        """``uint64[N * shards, runs]``."""
        return self.pages.addresses(part.pages, part.blocks, begin, end)

    def sources(self, part: RowPart, arena: Arena) -> npt.NDArray[np.uint64]:
        """``uint64[N * shards]``: where the shards lie in the arena, in this process."""
        slots = part.slots.astype(np.uint64) * np.uint64(arena.name.row_bytes[self.row])
        begin = np.uint64(arena.address(self.row) + self.inside)
        shards = np.arange(self.pages.layers, dtype=np.uint64) * np.uint64(self.shard_bytes)
        return np.ascontiguousarray((begin + slots[:, None] + shards).reshape(-1))

    def save(self, part: RowPart) -> BlockTransfer | None:
        """The blocks that this rank is elected to write."""
        mine = part.only(part.blocks % self.replicas == self.replica)
        if not len(mine):
            return None
        rows = self.addresses(mine, 0, None).reshape(len(mine), self.pages.layers, -1)
        return BlockTransfer(self.store, object_ids(self.seed, mine.links), rows)


def lanes_of(deployment: Deployment) -> list[Lane]:
    """Everything that this rank loads and saves; sidecars first, so that they are there when their source
    is found."""
    placement, rank = deployment.placement, deployment.facts.tp_rank
    assert placement is not None
    found = []
    for place, at in placement.of_rank(rank):
        shape = placement.geometry(place, at)
        every = placement.keys.of(place.row.name)
        replicas = placement.replicas(place.row)
        found.append(
            Lane(
                row=place.index,
                name=place.row.name,
                seed=at.seed,
                store=deployment.dumps[placement.store_name(place, at)],
                pages=placement.page_map(place, at),
                geometry=native_geometry(shape),
                shard_bytes=shape.shard_bytes,
                inside=every.index(at) * shape.shard_count * shape.shard_bytes,
                windowed=place.row.window is not None,
                replica=rank % replicas,
                replicas=replicas,
            )
        )
    return sorted(found, key=lambda lane: -lane.row)


def parts_of(op: Op, lane: Lane) -> list[RowPart]:
    """The blocks of an operation that concern a lane."""
    return [part for part in op.parts if part.row == lane.row and len(part)]
