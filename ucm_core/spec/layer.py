"""What an engine declares about one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.spec.kinds import Kind, RankRule, parse

TARGET = "target"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's cached data, as the adapter read it from the engine; never guessed from a model name.

    ``index``: global layer number inside its ``part`` (``"target"``, ``"draft"``, ...), over all PP
    stages. ``name``: the engine's own. ``heads``: kv (or state) heads over all ranks. ``entry_bytes``:
    bytes of one entry over all heads; an entry is one token, ``compression`` tokens of a compressed
    layer, or one state of a snapshot. ``window``: tokens, None for the whole prefix. ``grid``: tokens
    between possible snapshot positions. ``role``: what the bytes are where kind and shape do not say
    (``"indexer"``, ``"scales"``). ``follows``: name of the layer a sidecar or follower belongs to.

    A layer with a sidecar is declared twice, with the same index: itself, and its sidecar.
    """

    index: int
    name: str
    kind: Kind
    entry_bytes: int = 0
    heads: int = 1
    head_size: int = 1
    dtype: str = ""
    window: int | None = None
    compression: int = 1
    grid: int = 1
    role: str = ""
    part: str = TARGET
    rank_rule: RankRule = RankRule.INTERSECTION
    follows: str | None = None

    def __post_init__(self) -> None:
        where = f"layer {self.name!r}"
        object.__setattr__(self, "kind", parse(Kind, self.kind, where))
        object.__setattr__(self, "rank_rule", parse(RankRule, self.rank_rule, where))


def layers_from_lists(num_layers: int, **columns: Any) -> list[LayerSpec]:
    """Layers ``0 .. num_layers`` from columns: one value for all, or a list with one value a layer.

    Configuration files carry such lists, and some are one longer than the layer count (a draft
    layer). Raises ConfigError naming every list whose length disagrees; nothing is cut or padded.
    """
    known = {f.name for f in fields(LayerSpec)} - {"index"}
    unknown = sorted(set(columns) - known)
    if unknown:
        raise ConfigError(f"unknown layer columns {unknown}; known are {sorted(known)}")
    lists = {name: c for name, c in columns.items() if _is_list(c)}
    wrong = {name: len(c) for name, c in lists.items() if len(c) != num_layers}
    if wrong:
        problems = tuple(
            f"per-layer list {name!r} has {n} entries for {num_layers} layers; cut the entries of "
            "draft layers off and declare those as a part of their own"
            for name, n in wrong.items()
        )
        raise ConfigError("; ".join(problems), problems)
    columns.setdefault("name", [f"layers.{i}" for i in range(num_layers)])
    return [
        LayerSpec(index=i, **{n: c[i] if _is_list(c) else c for n, c in columns.items()})
        for i in range(num_layers)
    ]


def _is_list(column: Any) -> bool:
    return isinstance(column, Sequence) and not isinstance(column, str)
