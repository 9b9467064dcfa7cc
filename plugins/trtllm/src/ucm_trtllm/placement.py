"""Where each rank's objects lie: the spec table, its coordinates, and their place in the registered pages.

Built alike in the scheduler's process and in every worker's, from the checkpoint and the registered
memory. Ranks and sizes never enter an id, only global ranges do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.blocks import BlockGrid, PageMap, PieceRuns
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.errors import UnsupportedError
from ucm_core.identity import ModelIdentity
from ucm_core.identity.manifest import Manifest
from ucm_core.spec import (
    GroupSpec,
    KeySpace,
    Kind,
    LayerSpec,
    RankRule,
    SeededCoordinate,
    SpecTable,
    rank_heads,
)
from ucm_core.spec.attention import attention_layer
from ucm_core.store.contract import Geometry, RunShape
from ucm_trtllm.facts import KvShape
from ucm_trtllm.pages import Page, object_layout, page_grid, piece_runs, plain_page
from ucm_trtllm.pools import Group, Pool, Side

_BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Place:
    """One stored row in the pages. ``index``: as messages number it. ``tables``: numbers of its layer groups,
    by which lists by layer group are indexed; ``column_of``: per layer, which of them; ``bases``: per layer,
    address in page 0."""

    index: int
    row: GroupSpec
    page: Page
    grid: BlockGrid
    tables: tuple[int, ...]
    column_of: Mapping[int, int]
    bases: Mapping[int, int]
    stride: int


@dataclass(frozen=True, slots=True)
class Placement:
    """``places``: rows that are stored, chain rows before their sidecars. ``tp``: ranks that share a
    request. Refuses at construction what cannot be cut."""

    table: SpecTable
    keys: KeySpace
    places: tuple[Place, ...]
    tp: int

    @classmethod
    def build(cls, model: Model, tp: int, identity: ModelIdentity, manifest: Manifest) -> Placement:
        table = SpecTable.from_layers(model.layers(tp), grain=manifest.block_tokens)
        keys = KeySpace(table, identity, slices=manifest.head_slices)
        rows = [*table.chains, *(row for row in table.rows if row.kind is Kind.SIDECAR)]
        places = tuple(model.place(index, row) for index, row in enumerate(rows))
        placement = cls(table, keys, places, tp)
        for rank in range(tp):
            placement.of_rank(rank)
        return placement

    @property
    def grain(self) -> int:
        return self.table.grain

    @property
    def alignment(self) -> int:
        """The engine continues only from multiples of its pages."""
        return self.places[0].page.tokens

    @property
    def chains(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.row.kind is Kind.CHAIN)

    def followers(self, place: Place) -> tuple[Place, ...]:
        """The sidecars of a chain row: a block is of use only with them."""
        return tuple(other for other in self.places if other.row.follows == place.row.name)

    def replicas(self, row: GroupSpec) -> int:
        """Ranks that hold the same bytes of a row."""
        if row.rank_rule is RankRule.UNION:
            return self.tp
        return max(1, self.tp // row.heads)

    def of_rank(self, tp_rank: int) -> list[tuple[Place, SeededCoordinate]]:
        """The coordinates whose bytes this rank holds (its replicas hold the same)."""
        return [(place, at) for place in self.places for at in self._held(place, tp_rank)]

    def _held(self, place: Place, tp_rank: int) -> list[SeededCoordinate]:
        first, last = rank_heads(place.row, tp_rank, self.tp)
        held = [
            at
            for at in self.keys.of(place.row.name)
            if first <= at.coordinate.heads[0] and at.coordinate.heads[1] <= last
        ]
        if sum(at.coordinate.heads[1] - at.coordinate.heads[0] for at in held) != last - first:
            raise UnsupportedError(
                f"the namespace keeps the {place.row.heads} kv heads in slices that are larger than the "
                f"{last - first} heads of a tensor-parallel rank: use another namespace, or one written with "
                "more head_slices"
            )
        if place.page.opaque and len(held) > 1:
            raise UnsupportedError(
                f"pages of {place.page.dtype} cannot be cut between heads: use a namespace whose head_slices "
                f"is the tensor-parallel size {self.tp}"
            )
        return held

    def runs(self, place: Place, at: SeededCoordinate) -> PieceRuns:
        """The runs of one piece of this coordinate's heads in its rank's page."""
        first, last = at.coordinate.heads
        base = first // place.page.heads * place.page.heads
        if place.page.opaque:
            return piece_runs(place.page, place.grid, (0, place.page.heads))
        return piece_runs(place.page, place.grid, (first - base, last - base))

    def layout(self, place: Place, at: SeededCoordinate) -> LayoutDescriptor:
        first, last = at.coordinate.heads
        heads = place.page.heads if place.page.opaque else last - first
        return object_layout(place.page, place.grid, len(at.coordinate.layers), heads)

    def geometry(self, place: Place, at: SeededCoordinate) -> Geometry:
        """One shard a layer; runs as they lie in the engine's pages."""
        runs = self.runs(place, at)
        pieces = place.grid.pieces
        return Geometry(
            shard_count=len(at.coordinate.layers),
            shard_bytes=pieces * runs.nbytes,
            runs_per_shard=pieces * runs.count,
            run=runs.shapes[0],
            layout=str(self.layout(place, at)),
            more_runs=runs.shapes[1:],
        )

    def packed(self, place: Place, at: SeededCoordinate) -> Geometry:
        """The same objects with a shard in one piece: as they lie in the arena."""
        shape = self.geometry(place, at)
        return Geometry(
            shape.shard_count, shape.shard_bytes, 1, RunShape(shape.shard_bytes), shape.layout
        )

    def store_name(self, place: Place, at: SeededCoordinate) -> str:
        """Which store holds a coordinate: objects of one shape share one."""
        return f"{place.row.store}/{len(at.coordinate.layers)}"

    def page_map(self, place: Place, at: SeededCoordinate) -> PageMap:
        """Addresses of this process's pages."""
        layers = at.coordinate.layers
        columns: npt.NDArray[np.int64] = np.array(
            [place.column_of[layer] for layer in layers], np.int64
        )
        return PageMap(
            grid=place.grid,
            bases=np.array([place.bases[layer] for layer in layers], np.uint64),
            block_stride=place.stride,
            runs=self.runs(place, at),
            tables=columns,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint's shape over the memory that this process registered. ``page_of``: by layer group."""

    pool: Pool
    shape: KvShape
    heads: int
    dtype: str
    page_of: Mapping[int, Page]

    @classmethod
    def read(cls, pool: Pool, shape: KvShape, dtype: str, tp: int) -> Model:
        """Raises UnsupportedError where registration and checkpoint contradict each other."""
        found = sorted(layer for group in pool.groups for layer in group.layers)
        if found != list(range(shape.layers)):
            raise UnsupportedError(
                f"the engine registered KV of layers {found[:4]}...{found[-2:]} ({len(found)}), config.json "
                f"has {shape.layers}: draft layers, and layers without KV, are not supported yet"
            )
        heads = 1 if shape.latent else _rank_heads(shape.heads, tp)
        pages = {}
        for group in pool.groups:
            if shape.latent != (group.value_offset is None):
                raise UnsupportedError(
                    f"layer group {group.number} keeps "
                    f"{'K alone' if group.value_offset is None else 'K and V'}, but config.json describes "
                    f"{'MLA' if shape.latent else 'plain attention'}"
                )
            pages[group.number] = plain_page(
                heads=heads,
                head_size=shape.head_size,
                dtype=dtype,
                part_bytes=group.nbytes,
                tokens=pool.tokens,
                value_offset=group.value_offset,
            )
        if len({page.tokens for page in pages.values()}) != 1:
            raise UnsupportedError("layer groups with pages of different numbers of tokens")
        return cls(pool, shape, heads, dtype, pages)

    @property
    def page(self) -> Page:
        return next(iter(self.page_of.values()))

    @property
    def has_sides(self) -> bool:
        return any(group.sides for group in self.pool.groups)

    def layers(self, tp: int) -> list[LayerSpec]:
        """The declarations that the spec table is made of."""
        found = []
        for group in self.pool.groups:
            page = self.page_of[group.number]
            parts = 1 if group.value_offset is None else 2
            for layer in group.layers:
                main = attention_layer(
                    layer,
                    heads=self.shape.heads,
                    head_size=self.shape.head_size,
                    entry_bytes=parts * page.cell_bytes * self.shape.heads,
                    dtype=self.dtype,
                    window=group.window,
                    latent=self.shape.latent,
                )
                found.append(main)
                found += [self._side(layer, main, group, side, page) for side in group.sides]
        return sorted(found, key=lambda spec: spec.index)

    def _side(self, layer: int, main: LayerSpec, group: Group, side: Side, page: Page) -> LayerSpec:
        equal = side.replicated or self.shape.latent
        heads = 1 if equal else self.shape.heads
        entry, rest = divmod(side.nbytes * heads, page.tokens * (1 if equal else self.heads))
        if rest:
            raise UnsupportedError(
                f"layer group {group.number}: {side.nbytes} bytes of {side.role!r} a page are no whole bytes "
                f"a token and head ({page.tokens} tokens)"
            )
        return LayerSpec(
            index=layer,
            name=f"{main.name}.{side.role}",
            kind=Kind.SIDECAR,
            entry_bytes=entry,
            heads=heads,
            dtype=_BYTES,
            window=group.window,
            role=side.role,
            rank_rule=RankRule.UNION if equal else RankRule.INTERSECTION,
            follows=main.name,
        )

    def place(self, index: int, row: GroupSpec) -> Place:
        """A row in the registered pages. Raises UnsupportedError where its layers do not lie alike."""
        side = row.kind is Kind.SIDECAR
        bases: dict[int, int] = {}
        table_of: dict[int, int] = {}
        pages: set[Page] = set()
        strides: set[int] = set()
        for group in self.pool.groups:
            mine = [layer for layer in group.layers if layer in row.layers]
            if not mine:
                continue
            where, page, stride = self._source(group, row, side=side)
            pages.add(page)
            strides.add(stride)
            for layer in mine:
                bases[layer] = where[group.layers.index(layer)]
                table_of[layer] = group.number
        if len(pages) != 1 or len(strides) != 1:
            raise UnsupportedError(
                f"row {row.name}: its layers lie in pages of several kinds, which is not supported yet"
            )
        (page,) = pages
        tables = tuple(sorted(set(table_of.values())))
        return Place(
            index=index,
            row=row,
            page=page,
            grid=page_grid(page, row.block_tokens),
            tables=tables,
            column_of={layer: tables.index(table) for layer, table in table_of.items()},
            bases=bases,
            stride=strides.pop(),
        )

    def _source(
        self, group: Group, row: GroupSpec, *, side: bool
    ) -> tuple[tuple[int, ...], Page, int]:
        page = self.page_of[group.number]
        if not side:
            return group.bases, page, group.stride
        one = next(found for found in group.sides if found.role == row.role)
        cell = one.nbytes // page.tokens
        whole = Page(1, page.tokens, cell, cell, _BYTES, None, opaque=True)
        return one.bases, whole, one.stride


def _rank_heads(heads: int, tp: int) -> int:
    if tp >= heads:
        if tp % heads:
            raise UnsupportedError(f"{heads} kv heads over {tp} ranks")
        return 1
    if heads % tp:
        raise UnsupportedError(f"{heads} kv heads do not spread evenly over {tp} ranks")
    return heads // tp
