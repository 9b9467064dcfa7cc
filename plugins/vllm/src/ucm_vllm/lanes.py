"""Worker side: the coordinates of one rank, and from an operation to transfers of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.blocks import PageMap
from ucm_core.adapter.layers import RowTransfer
from ucm_core.adapter.transfer import BlockTransfer
from ucm_core.store.contract import BlockStore
from ucm_vllm.identity import object_ids, snapshot_ids
from ucm_vllm.messages import RowBlocks, TransferOp


@dataclass(frozen=True, slots=True)
class Lane:
    """One coordinate of this rank: its row, store, ids and addresses.

    ``row``: index of its row, ``row_name``: the row's name. ``replica``/``replicas``: content equal on
    several ranks has one writer per block, elected by block index. ``block_bytes``: bytes of one
    stored block at this coordinate. ``windowed``: vLLM may take its blocks back while their request runs.
    ``snapshot``: its objects are whole states, known by their position as well.
    """

    row: int
    store: BlockStore
    seed: bytes
    pages: PageMap
    block_bytes: int
    row_name: str = ""
    replica: int = 0
    replicas: int = 1
    windowed: bool = False
    snapshot: bool = False

    def ids(self, blocks: RowBlocks) -> npt.NDArray[np.uint8]:
        """``uint8[N, 16]``: the objects of these blocks at this coordinate."""
        if not self.snapshot:
            return object_ids(self.seed, blocks.links)
        ends = (blocks.blocks + 1) * self.pages.grid.block_tokens
        return snapshot_ids(self.seed, blocks.links, ends)

    def transfer(self, blocks: RowBlocks, begin: int = 0, end: int | None = None) -> BlockTransfer:
        """These blocks at this coordinate; tokens outside ``[begin, end)`` are skipped."""
        at = self.pages.addresses(blocks.pages, blocks.blocks, begin, end)
        shape = (len(blocks), self.pages.layers, self.pages.runs_per_shard)
        transfer = BlockTransfer(self.store, self.ids(blocks), at.reshape(shape))
        if (
            self.snapshot and not at.all()
        ):  # a state is usable whole or not at all: nothing may be skipped
            transfer.refused.append("vLLM gave no block for a state")
        return transfer


@dataclass(slots=True)
class Part:
    """One lane's share of an operation, and the numbers of the blocks that it covers."""

    lane: Lane
    numbers: npt.NDArray[np.int64]
    transfer: BlockTransfer

    def by_layer(self) -> RowTransfer:
        """For the layer pipeline."""
        return RowTransfer(self.lane.row_name, self.transfer)


def to_load(lanes: Sequence[Lane], op: TransferOp) -> list[Part]:
    """Every lane's share of a load."""
    return [
        Part(lane, np.arange(len(part)) + offset, lane.transfer(part, op.begin, op.end))
        for part, offset in zip(op.parts, op.offsets, strict=True)
        for lane in lanes
        if lane.row == part.row
    ]


def to_save(lanes: Sequence[Lane], op: TransferOp) -> list[Part]:
    """Every lane's share of a save: of content equal on several ranks, what this one was elected for."""
    found = []
    for part, offset in zip(op.parts, op.offsets, strict=True):
        for lane in lanes:
            if lane.row == part.row:
                mine = np.arange(len(part))
                if lane.replicas > 1:
                    mine = mine[(part.blocks + op.attempt) % lane.replicas == lane.replica]
                found.append(Part(lane, mine + offset, lane.transfer(part.only(mine))))
    return found


def fence(parts: Sequence[Part]) -> None:
    """What is not over is cancelled: no byte of these parts moves any more."""
    for part in parts:
        part.transfer.fence()
