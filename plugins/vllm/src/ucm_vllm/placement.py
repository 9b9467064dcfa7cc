"""Where each rank's objects lie: the spec table, its coordinates, and their place in vLLM's pages.

One object used by both sides: the scheduler asks the store for every coordinate of a block, a worker
moves the bytes of its own. Ranks and sizes never enter an id, only global ranges do. A row of the
table is made of what layers are, so it may take its layers from several of vLLM's groups, each with a
block table of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.blocks import BlockGrid, PageShape, PieceRuns
from ucm_core.adapter.layout import ITEM_BYTES, LayoutDescriptor
from ucm_core.adapter.retention import RetentionChoice
from ucm_core.errors import UnsupportedError
from ucm_core.identity import Manifest, ModelIdentity
from ucm_core.spec import (
    Coordinate,
    GroupSpec,
    KeySpace,
    Kind,
    LayerSpec,
    SeededCoordinate,
    SpecTable,
    attention_layer,
    rank_heads,
)
from ucm_vllm.facts import Facts, PageKind
from ucm_vllm.page_layout import object_layout, page_grid, page_shape, piece_runs
from ucm_vllm.states import StateKind


def spec_table(
    facts: Facts, dtype: str, block_tokens: int, retention: RetentionChoice | None = None
) -> SpecTable:
    """The rows of a model: its layers grouped by what they are, whatever groups vLLM made of them.

    Without a retention interval every state that vLLM keeps at a boundary is worth storing: vLLM has one.
    """
    layers: list[LayerSpec] = []
    for index in range(len(facts.kind_of)):
        state = _state_layer(facts, index, block_tokens)
        if state is not None:
            layers.append(state)
        if state is None or facts.kind_of[index] is not None:
            layers.append(_layer(facts, index, dtype))
    kept = (retention or RetentionChoice()).of_row(block_tokens)
    return SpecTable.from_layers(layers, grain=block_tokens, retention=kept)


def _state_layer(facts: Facts, index: int, grain: int) -> LayerSpec | None:
    number = facts.state_kind_of[index] if facts.states else None
    if number is None:
        return None
    kind = facts.states[number]
    # Each rank's part is an object of its own. What lies in it (several quantities, each split) is the
    # model's to know, so parts are neither joined nor cut: another number of ranks is a clean miss.
    return LayerSpec(
        index=index,
        name=f"layers.{index}.state",
        kind=Kind.SNAPSHOT,
        entry_bytes=kind.nbytes * kind.ranks,
        heads=kind.ranks,
        dtype="bytes",
        grid=math.lcm(kind.engine_block, grain),
    )


def _layer(facts: Facts, index: int, dtype: str) -> LayerSpec:
    name, number = f"layers.{index}", facts.kind_of[index]
    if number is None:
        return LayerSpec(index=index, name=name, kind=Kind.NONE)
    kind = facts.kinds[number]
    return attention_layer(
        index,
        heads=kind.total_heads,
        head_size=kind.head_size,
        entry_bytes=kind.cell_bytes * kind.total_heads,
        dtype=dtype,
        window=kind.window,
        latent=kind.kind == "mla",
    )


@dataclass(frozen=True, slots=True)
class Place:
    """One row in vLLM's blocks. ``index``: its place among the rows, as messages name it.

    ``tables``: vLLM's groups of its kind, ascending; ``column_of``: per layer of this process's stage,
    which of them. ``salt`` tells the blocks of rows that end at one link apart in memories keyed by 64
    bits.
    """

    index: int
    row: GroupSpec
    grid: BlockGrid
    tables: tuple[int, ...]
    column_of: dict[int, int]
    salt: int

    def columns(self, layers: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """``int64[layers]``: for each layer the column of ``pages[N, tables, pieces]`` it uses."""
        return np.array([self.column_of[layer] for layer in layers], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RowPlace(Place):
    """A chain row: its blocks lie in pages of ``kind``."""

    kind: PageKind


@dataclass(frozen=True, slots=True)
class StatePlace(Place):
    """A snapshot row. Block ``i`` stands for the state after ``(i + 1) * row.block_tokens`` tokens, which
    is one block of vLLM in each of ``tables``; ``grid`` is of one piece."""

    kind: StateKind


@dataclass(frozen=True, slots=True)
class Placement:
    """How this deployment cuts a namespace's objects; refuses at construction what cannot be cut.

    ``rows``: the chain rows, ``states``: the snapshot rows; messages number them in this order.
    """

    facts: Facts
    table: SpecTable
    keys: KeySpace
    rows: tuple[RowPlace, ...]
    states: tuple[StatePlace, ...] = ()

    @classmethod
    def build(
        cls,
        facts: Facts,
        identity: ModelIdentity,
        manifest: Manifest,
        dtype: str,
        retention: RetentionChoice | None = None,
    ) -> Placement:
        table = spec_table(facts, dtype, manifest.block_tokens, retention)
        stages = {"target": [range(*stage) for stage in facts.stages]}
        keys = KeySpace(table, identity, stages=stages, slices=manifest.head_slices)
        rows = tuple(_place(facts, keys, index, row) for index, row in enumerate(table.chains))
        states = tuple(
            _state_place(facts, keys, index, row)
            for index, row in enumerate(table.snapshots, len(rows))
        )
        placement = cls(facts, table, keys, rows, states)
        for rank in range(facts.tp):
            placement.of_rank(0, rank)
        return placement

    @property
    def grain(self) -> int:
        """Tokens of one link of the content chain."""
        return self.table.grain

    @property
    def places(self) -> tuple[RowPlace | StatePlace, ...]:
        """All rows that are stored, as messages number them."""
        return (*self.rows, *self.states)

    def place(self, row: GroupSpec) -> RowPlace:
        return next(place for place in self.rows if place.row.name == row.name)

    def state_place(self, row: GroupSpec) -> StatePlace | None:
        """None: not a snapshot row."""
        return next((place for place in self.states if place.row.name == row.name), None)

    def all(self) -> tuple[SeededCoordinate, ...]:
        """Every coordinate of every row; a block is there when all of its row are."""
        return tuple(at for place in self.places for at in self.keys.of(place.row.name))

    def of_rank(self, pp_rank: int, tp_rank: int) -> list[SeededCoordinate]:
        """The coordinates whose bytes this rank holds (its replicas hold the same)."""
        return [at for place in self.places for at in self._held(place.row, pp_rank, tp_rank)]

    def _held(self, row: GroupSpec, pp_rank: int, tp_rank: int) -> list[SeededCoordinate]:
        first, last = rank_heads(row, tp_rank, self.facts.tp)
        stage = range(*self.facts.stages[pp_rank])
        mine = [at for at in self.keys.of(row.name) if at.coordinate.layers[0] in stage]
        held = [
            at for at in mine if first <= at.coordinate.heads[0] and at.coordinate.heads[1] <= last
        ]
        width = sum(at.coordinate.heads[1] - at.coordinate.heads[0] for at in held)
        if mine and width != last - first:
            raise UnsupportedError(
                f"the namespace keeps the {row.heads} kv heads in {len(mine)} slices, but each of "
                f"{self.facts.tp} tensor-parallel ranks holds {last - first}: a rank would hold part of a "
                "slice. Use another namespace, or one written with more head_slices"
            )
        return held

    def page(self, row: GroupSpec) -> PageShape:
        """Strides inside a page of one layer of ``row``."""
        return page_shape(self.place(row).kind, self.facts.physical_order)

    def runs(self, at: SeededCoordinate) -> PieceRuns:
        """The runs of one piece of this coordinate's heads in its rank's page."""
        place = self.place(at.row)
        first, last = at.coordinate.heads
        # First head of the rank that holds it.
        base = first // place.kind.heads * place.kind.heads
        heads = (first - base, last - base)
        item_bytes = ITEM_BYTES.get(place.row.dtype, 1)
        return piece_runs(place.kind, self.page(at.row), place.grid, heads, item_bytes)

    def layout(self, at: SeededCoordinate) -> LayoutDescriptor:
        """Order of the bytes of a coordinate's objects: runs of vLLM's own pages, one shard a layer."""
        state = self.state_place(at.row)
        if state is not None:
            return state.kind.layout(len(at.coordinate.layers))
        return self._layout(self.place(at.row), at.coordinate)

    def _layout(self, place: RowPlace, coordinate: Coordinate) -> LayoutDescriptor:
        heads = coordinate.heads[1] - coordinate.heads[0]
        return object_layout(
            place.kind,
            self.facts.physical_order,
            place.grid,
            place.row.dtype,
            len(coordinate.layers),
            heads,
        )


def _place(facts: Facts, keys: KeySpace, index: int, row: GroupSpec) -> RowPlace:
    numbers = {facts.kind_of[layer] for layer in row.layers}
    if len(numbers) != 1 or None in numbers:
        raise UnsupportedError(
            f"row {row.name}: its layers have pages of several kinds ({sorted(map(str, numbers))}), "
            "which is not supported yet"
        )
    (number,) = numbers
    assert number is not None
    kind = facts.kinds[number]
    tables = tuple(table for table, of in enumerate(facts.tables) if of == number)
    return RowPlace(
        index=index,
        row=row,
        kind=kind,
        grid=page_grid(kind, row.block_tokens),
        tables=tables,
        column_of={
            layer: tables.index(facts.table_of[layer])
            for layer in row.layers
            if layer in facts.table_of
        },
        salt=_salt(keys, row),
    )


def _state_place(facts: Facts, keys: KeySpace, index: int, row: GroupSpec) -> StatePlace:
    numbers = {facts.state_kind_of[layer] for layer in row.layers}
    if len(numbers) != 1 or None in numbers:
        raise UnsupportedError(
            f"row {row.name}: its layers have states of several kinds ({sorted(map(str, numbers))}) that "
            "are equally large, which is not supported yet"
        )
    (number,) = numbers
    assert number is not None
    tables = tuple(table for table, of in enumerate(facts.state_tables) if of == number)
    return StatePlace(
        index=index,
        row=row,
        kind=facts.states[number],
        grid=BlockGrid(row.block_tokens, row.block_tokens),
        tables=tables,
        column_of={
            layer: tables.index(facts.state_table_of[layer])
            for layer in row.layers
            if layer in facts.state_table_of
        },
        salt=_salt(keys, row),
    )


def _salt(keys: KeySpace, row: GroupSpec) -> int:
    return int.from_bytes(keys.of(row.name)[0].seed[:8], "little")
