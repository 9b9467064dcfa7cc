"""The spec table: built once from what an engine declares, read-only after. A new model is rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ucm_core.errors import ConfigError
from ucm_core.spec import check
from ucm_core.spec.group import GroupSpec, Retention
from ucm_core.spec.kinds import Kind, Unit
from ucm_core.spec.layer import TARGET, LayerSpec


class SpecTable:
    """Rows in the order given. Immutable; any thread may read it.

    ``grain``: the namespace's ``block_tokens``. ``num_layers``: layers per model part, over all PP
    stages (an int means the target part). Raises ConfigError listing every contradiction.
    """

    __slots__ = (
        "_by_name",
        "chains",
        "checkpoint_grid",
        "common_grid",
        "grain",
        "num_layers",
        "rows",
        "snapshot_grid",
        "snapshots",
        "warnings",
    )

    def __init__(
        self, rows: Iterable[GroupSpec], *, grain: int, num_layers: int | Mapping[str, int]
    ) -> None:
        counts = {TARGET: num_layers} if isinstance(num_layers, int) else dict(num_layers)
        self.rows: tuple[GroupSpec, ...] = tuple(rows)
        self.grain = grain
        self.num_layers: Mapping[str, int] = MappingProxyType(counts)
        found = tuple(check.problems(self.rows, grain, counts))
        if found:
            raise ConfigError("the spec table contradicts itself: " + "; ".join(found), found)
        self._by_name = {row.name: row for row in self.rows}
        #: Rows that vote, and rows of which every one must have a checkpoint.
        self.chains = tuple(row for row in self.rows if row.kind is Kind.CHAIN)
        self.snapshots = tuple(row for row in self.rows if row.kind is Kind.SNAPSHOT)
        #: Tokens: least common multiple of the voting rows' blocks, 1 without any.
        self.common_grid = math.lcm(*(row.block_tokens for row in self.chains))
        #: Tokens: positions that every snapshot row and a whole link can have.
        self.snapshot_grid = math.lcm(grain, *(row.block_tokens for row in self.snapshots))
        #: Tokens: of these, those at which chain blocks end too: a checkpoint elsewhere is out of
        #: reach for a request that shares no more than whole blocks.
        self.checkpoint_grid = math.lcm(self.snapshot_grid, self.common_grid)
        #: What is legal but costs hits; to be logged once at start.
        self.warnings = tuple(check.warnings(self.rows))

    def __getitem__(self, name: str) -> GroupSpec:
        return self._by_name[name]

    def __repr__(self) -> str:
        return f"SpecTable({', '.join(row.name for row in self.rows)}; grain {self.grain})"

    @classmethod
    def from_layers(
        cls,
        layers: Iterable[LayerSpec],
        *,
        grain: int,
        retention: Retention | None = None,
    ) -> SpecTable:
        """Group declared layers into rows, whatever groups the engine's allocator made of them.

        A chain row's block is the least multiple of ``grain`` that its compression divides. The layer
        count of each part is the number of its distinct indices. ``retention`` applies to snapshots.
        """
        declared = list(layers)
        counts: dict[str, int] = {}
        for part in dict.fromkeys(layer.part for layer in declared):
            counts[part] = len({layer.index for layer in declared if layer.part == part})
        grouped: dict[LayerSpec, list[int]] = {}
        for layer in declared:
            grouped.setdefault(_key(layer, declared), []).append(layer.index)
        names = _names(list(grouped))
        row_of = {layer.name: names[_key(layer, declared)] for layer in declared if _owns(layer)}
        rows = [
            _row(key, names[key], tuple(numbers), row_of, retention or Retention())
            for key, numbers in grouped.items()
        ]
        return cls(_with_blocks(rows, grain), grain=grain, num_layers=counts)


def _owns(layer: LayerSpec) -> bool:
    """A sidecar is declared under its layer's name too; the name means the layer itself."""
    return layer.kind is not Kind.SIDECAR


def _key(layer: LayerSpec, declared: Sequence[LayerSpec]) -> LayerSpec:
    """``layer`` without what may differ inside a group. ``follows`` becomes a key of the source."""
    follows = None
    if layer.follows is not None:
        source = next((d for d in declared if d.name == layer.follows and _owns(d)), None)
        if source is None or source.follows is not None:
            raise ConfigError(
                f"layer {layer.name!r} follows {layer.follows!r}, which is no declared layer with "
                "data of its own"
            )
        key = _key(source, declared)
        follows = next(d.name for d in declared if _owns(d) and _key(d, declared) == key)
    if layer.kind in (Kind.NONE, Kind.FOLLOWER):
        return LayerSpec(-1, "", layer.kind, part=layer.part, follows=follows)
    return replace(layer, index=-1, name="", follows=follows)


def _names(keys: Sequence[LayerSpec]) -> dict[LayerSpec, str]:
    """A readable unique name per group: ``chain.h8x128.bf16.w1024``."""
    names: dict[LayerSpec, str] = {}
    for key in keys:
        words = [] if key.part == TARGET else [key.part]
        words.append(key.role or key.kind.value)
        if key.kind not in (Kind.NONE, Kind.FOLLOWER):
            words += [f"h{key.heads}x{key.head_size}", key.dtype or "bytes"]
            words += [f"w{key.window}"] if key.window is not None else []
            words += [f"c{key.compression}"] if key.compression != 1 else []
        name = unique = ".".join(words)
        taken = set(names.values())
        n = 2
        while unique in taken:
            unique, n = f"{name}.{n}", n + 1
        names[key] = unique
    return names


def _row(
    key: LayerSpec,
    name: str,
    numbers: tuple[int, ...],
    row_of: Mapping[str, str],
    retention: Retention,
) -> GroupSpec:
    unit = Unit.LAYER
    if key.follows is not None:
        unit = Unit.FOLLOWER
    elif key.kind is Kind.CHAIN and key.window is not None:
        unit = Unit.WINDOW
    return GroupSpec(
        name=name,
        kind=key.kind,
        layers=numbers,
        block_tokens=key.grid if key.kind is Kind.SNAPSHOT else 0,
        entry_bytes=key.entry_bytes,
        heads=key.heads,
        head_size=key.head_size,
        dtype=key.dtype,
        window=key.window,
        compression=key.compression,
        rank_rule=key.rank_rule,
        retention=retention if key.kind is Kind.SNAPSHOT else Retention(),
        follows=row_of[key.follows] if key.follows is not None else None,
        unit=unit,
        role=key.role,
        part=key.part,
    )


def _with_blocks(rows: Sequence[GroupSpec], grain: int) -> list[GroupSpec]:
    """Give chain rows the least block that they and their sidecars can be cut into."""
    blocks = {
        row.name: math.lcm(
            grain, row.compression, *(r.compression for r in rows if r.follows == row.name)
        )
        for row in rows
        if row.kind is Kind.CHAIN
    }
    return [
        replace(row, block_tokens=blocks[row.name if row.kind is Kind.CHAIN else row.follows or ""])
        if row.kind in (Kind.CHAIN, Kind.SIDECAR) and (row.follows or row.name) in blocks
        else row
        for row in rows
    ]
