"""Which objects of a namespace the pools of this rank hold: rows of a spec table, and their coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ucm_core.errors import UnsupportedError
from ucm_core.identity import Manifest, ModelIdentity
from ucm_core.spec import (
    GroupSpec,
    Kind,
    LayerSpec,
    SpecTable,
    attention_layer,
    head_slices,
    rank_heads,
)
from ucm_sglang.pool_shape import PageCut, PoolShape
from ucm_sglang.server import Server


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands; ``layers``: the global layers ``[first, last)`` of its pipeline stage."""

    tp: int
    tp_size: int
    layers: tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeldObject:
    """One object of every page: its seed (32 bytes) and its place in the page."""

    seed: bytes
    cut: PageCut


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool and the objects its pages consist of, all of one geometry."""

    shape: PoolShape
    row: GroupSpec
    held: tuple[HeldObject, ...]


#: SGLang's names of the pool whose pages are the prefix, and of the one of sliding windows.
ANCHOR = "kv"
_SLIDING = "swa"


def pool_rows(
    shapes: Mapping[str, PoolShape],
    server: Server,
    identity: ModelIdentity,
    manifest: Manifest,
    ranks: Ranks,
) -> dict[str, PoolRow]:
    """A row for each pool. With one pool its ids are those of every engine. Raises UnsupportedError."""
    alone = len(shapes) == 1
    if not alone:
        # Windows and states lie in pools that are SGLang's own idea: shared among SGLang servers.
        identity = identity.with_extra(engine="sglang", pools=sorted(shapes))
    table, row_of = _table(shapes, server, manifest, alone=alone, tp_size=ranks.tp_size)
    rows: dict[str, PoolRow] = {}
    for name, shape in shapes.items():
        row = table[row_of[name]]
        layers = range(*ranks.layers) if alone else row.layers
        if len(layers) != shape.layers:
            raise UnsupportedError(
                f"host pool {name!r} keeps {shape.layers} layers, but this rank's are {layers}"
            )
        rows[name] = PoolRow(
            shape, row, _held(shape, row, tuple(layers), identity, manifest, ranks)
        )
    return rows


def _table(
    shapes: Mapping[str, PoolShape],
    server: Server,
    manifest: Manifest,
    *,
    alone: bool,
    tp_size: int,
) -> tuple[SpecTable, dict[str, str]]:
    layers: list[LayerSpec] = []
    first: dict[str, int] = {}
    for name, shape in shapes.items():
        first[name] = len(layers)
        count = server.layers if alone else shape.layers
        layers += [_layer(len(layers) + i, name, shape, server, tp_size) for i in range(count)]
    table = SpecTable.from_layers(layers, grain=manifest.block_tokens)
    names = {
        name: next(row.name for row in table.rows if index in row.layers)
        for name, index in first.items()
    }
    return table, names


def _layer(index: int, name: str, shape: PoolShape, server: Server, tp_size: int) -> LayerSpec:
    if shape.kind == "state":
        return LayerSpec(
            index=index,
            name=f"layers.{index}.state",
            kind=Kind.SNAPSHOT,
            entry_bytes=shape.head_size * tp_size,
            heads=tp_size,  # the share of a rank: states are split by ranks, whatever they consist of
            head_size=shape.head_size,
            dtype="bytes",
            grid=shape.tokens,
        )
    heads = 1 if shape.kind == "latent" else server.kv_heads
    cell = shape.pages.page_bytes // (shape.tokens * shape.layers * shape.heads)
    layer = attention_layer(
        index,
        heads=heads,
        head_size=shape.head_size,
        entry_bytes=cell * heads,
        dtype=shape.dtype,
        window=server.window if name == _SLIDING else None,
        latent=shape.kind == "latent",
    )
    # Equal layers in two pools are two rows: a page has its own place in each.
    return layer if name == ANCHOR else replace(layer, role=name)


def _held(
    shape: PoolShape,
    row: GroupSpec,
    layers: tuple[int, ...],
    identity: ModelIdentity,
    manifest: Manifest,
    ranks: Ranks,
) -> tuple[HeldObject, ...]:
    slices = ranks.tp_size if shape.kind == "state" else manifest.head_slices
    first, last = rank_heads(row, ranks.tp, ranks.tp_size)
    if last - first != shape.heads:
        raise UnsupportedError(
            f"the model has {row.heads} kv heads, so a page of one of {ranks.tp_size} ranks should hold "
            f"{last - first}; SGLang's holds {shape.heads}"
        )
    mine = [(a, b) for a, b in head_slices(row, slices) if first <= a and b <= last]
    if sum(b - a for a, b in mine) != last - first:
        raise UnsupportedError(
            f"the namespace keeps the {row.heads} kv heads in {slices} slices, but each of "
            f"{ranks.tp_size} tensor-parallel ranks holds {last - first}: a rank would hold part of a "
            "slice. Use another namespace, or one written with more head_slices"
        )
    return tuple(
        HeldObject(
            seed=identity.group(row.facts, layers, (a, b)).seed(),
            cut=shape.cut(a - first, b - first),
        )
        for a, b in mine
    )


def ranks_of(storage_config: Any, pool: Any, layers: int) -> Ranks:
    """``pool``: the first host pool, which knows its layers; ``layers``: of the whole model."""
    first = int(getattr(pool, "start_layer", 0) or 0)
    count = int(getattr(pool, "layer_num", layers))
    return Ranks(storage_config.tp_rank, storage_config.tp_size, (first, first + count))
