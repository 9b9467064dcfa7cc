"""From a model's rows to the spec table. Every kind of layer is one entry; no model is named."""

from __future__ import annotations

import hashlib

import numpy as np

from ucm_core.adapter.retention import RetentionChoice
from ucm_core.identity import ModelIdentity
from ucm_core.spec import GroupSpec, Kind, RankRule, SpecTable, Unit
from ucm_reference.memory import cell
from ucm_reference.model import STATEFUL, LayerRow, Model


def spec_table(
    model: Model, block_tokens: int, retention: RetentionChoice | None = None
) -> SpecTable:
    """``block_tokens``: the namespace's; a compressed row's block is a multiple of its entries too.
    ``retention``: what the operator chose instead of the model's intervals."""
    chosen = retention or RetentionChoice()
    rows = [_row(model, row, block_tokens, chosen) for row in model.rows]
    return SpecTable(rows, grain=block_tokens, num_layers=len(model.layers))


def model_identity(model: Model) -> ModelIdentity:
    """Everything that changes bytes: rows without their names, sizes, the seed of the weights."""
    shapes = [
        (
            row.kind,
            row.layers,
            row.heads,
            row.queries,
            row.width,
            row.window,
            row.compression,
            row.top,
        )
        for row in model.rows
    ]
    order = [model.rows.index(row) for row in model.layers]
    text = repr((shapes, order, model.hidden, model.vocabulary, model.seed))
    return ModelIdentity("id:reference/" + hashlib.sha256(text.encode()).hexdigest(), "int8")


def _row(model: Model, row: LayerRow, block_tokens: int, retention: RetentionChoice) -> GroupSpec:
    layers = model.numbers(row.name)
    if row.kind == "cross":
        return GroupSpec(row.name, Kind.NONE, layers)
    if row.kind == "shared":
        return GroupSpec(row.name, Kind.FOLLOWER, layers, follows=row.follows, unit=Unit.FOLLOWER)
    dtype, elements = cell(row)
    joined = Unit.ROW if row.together > 1 else Unit.LAYER
    if row.kind in STATEFUL:
        return GroupSpec(
            row.name,
            Kind.SNAPSHOT,
            layers,
            row.grid,
            row.heads * elements * dtype.itemsize,
            heads=row.heads,
            head_size=row.width,
            dtype="fp32",
            retention=retention.of_row(row.interval),
            unit=joined,
            role=row.kind,
            store=row.store,
        )
    sidecar = row.kind == "indexer"
    source = model.row(row.follows) if row.follows is not None else row
    return GroupSpec(
        row.name,
        Kind.SIDECAR if sidecar else Kind.CHAIN,
        layers,
        int(np.lcm(block_tokens, source.compression)),
        row.heads * elements,
        heads=row.heads,
        head_size=row.width,
        dtype="int8",
        window=row.window,
        compression=row.compression,
        rank_rule=RankRule.UNION if row.heads == 1 else RankRule.INTERSECTION,
        follows=row.follows,
        unit=Unit.FOLLOWER if sidecar else Unit.WINDOW if row.window is not None else joined,
        role={"full": "", "latent": "latent", "compressed": "compressed"}.get(row.kind, row.kind),
        store=row.store,
    )
