"""From a published ``config.json`` to declared layers and a spec table, for planning without an engine.

What an engine declares is better knowledge and is what adapters use: it also has buffers of the engine's
own (tails of compressors, padded states), and its choice of cache types. This reads what the model
publishes, by the rules in ``rules.yaml``, and refuses what no rule covers instead of guessing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.spec.from_config.fields import Fields
from ucm_core.spec.from_config.patterns import KindOf, layer_kinds
from ucm_core.spec.from_config.rules import Keep, Rules, Variant, rules
from ucm_core.spec.group import Retention
from ucm_core.spec.kinds import Kind, RankRule
from ucm_core.spec.layer import TARGET, LayerSpec
from ucm_core.spec.table import SpecTable

DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """What a file says: ``layers`` as an engine would declare them, ``kv_dtype`` our name of the
    element type of the KV cache, ``path`` where it came from."""

    path: str
    kv_dtype: str
    layers: tuple[LayerSpec, ...]

    def table(self, grain: int, retention: Retention | None = None) -> SpecTable:
        """The spec table at ``grain`` tokens a stored block. Checkpoints lie on the grain."""
        return SpecTable.from_layers(self.layers, grain=grain, retention=retention)


def read_model_config(
    path: str | Path, *, kv_dtype: str | None = None, grain: int = 64
) -> PublishedModel:
    """Read ``path`` (a file, or a directory with a ``config.json``).

    ``kv_dtype``: a published or our own name of a cache type, instead of the model's own. ``grain``:
    where states may lie. Raises ConfigError for a file that cannot be read, a field that is missing,
    a list that does not fit, a layer kind or a cache-like field that no rule covers.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return _Reader(rules(), config, str(path), kv_dtype, grain).model()


class _Reader:
    def __init__(
        self, table: Rules, config: Mapping[str, Any], path: str, kv_dtype: str | None, grain: int
    ) -> None:
        self.rules, self.path, self.grain = table, path, grain
        self.fields = Fields(table, _language_model(table, config), path)
        model = self.fields.raw("dtype") or config.get("torch_dtype") or config.get("dtype")
        self.model_dtype, model_bytes = self._dtype(model or table.default_dtype)
        self.kv_dtype, kv_bytes = self._dtype(kv_dtype or self.model_dtype)
        state = self.fields.raw("state_dtype")
        self.state_dtype, state_bytes = self._dtype(state or self.model_dtype)
        self.sizes = {
            "kv_bytes": kv_bytes,
            "model_bytes": model_bytes,
            "state_bytes": state_bytes,
        }

    def _dtype(self, name: str) -> tuple[str, int]:
        for published, known in self.rules.dtypes.items():
            if name in (published, known[0]):
                return known
        listed = ", ".join(known for known, _ in self.rules.dtypes.values())
        raise ConfigError(f"{self.path}: unknown element type {name!r}; known are {listed}")

    def model(self) -> PublishedModel:
        count = self.fields["layers"]
        drafts = int(self.fields.raw("drafts") or 0)
        kinds = layer_kinds(self.rules, self.fields, count, drafts)
        shared = int(self.fields.raw("shared") or 0)
        layers: list[LayerSpec] = []
        for i, kind in enumerate(kinds):
            part, index = (TARGET, i) if i < count else (DRAFT, i - count)
            if part == TARGET and i >= count - shared:
                layers.append(self._follower(i, kind, kinds[: count - shared]))
            else:
                layers += self._layer(part, index, i, kind)
        unread = self.fields.unread()
        if unread:
            raise ConfigError(
                f"{self.path}: {', '.join(unread)} say that layers keep something that no rule reads; "
                "add a row to the rule table instead of trusting numbers without it"
            )
        return PublishedModel(self.path, self.kv_dtype, tuple(layers))

    def _layer(self, part: str, index: int, running: int, kind: KindOf) -> list[LayerSpec]:
        """Everything that one layer keeps. ``running``: its number over target and drafts."""
        values = {**self._per_layer(running), **kind.numbers, **self.sizes}
        name = f"layers.{index}" if part == TARGET else f"{part}.layers.{index}"
        made: list[LayerSpec] = []
        for keep in self._variant(kind.kind).keeps:
            if keep.if_ is None or keep.if_(_Optional(self.fields, values)):
                made.append(self._keep(keep, name, index, part, values, made))
        return made or [LayerSpec(index, name, Kind.NONE, part=part)]

    def _variant(self, kind: str) -> Variant:
        return next(v for v in self.rules.kinds[kind] if all(n in self.fields for n in v.needs))

    def _keep(
        self,
        keep: Keep,
        name: str,
        index: int,
        part: str,
        values: Mapping[str, int],
        before: list[LayerSpec],
    ) -> LayerSpec:
        known = _Required(self.fields, values)
        sidecar = keep.kind == "sidecar"
        own_name = f"{name}.{keep.role}" if keep.role else name
        return LayerSpec(
            index=index,
            name=own_name,
            kind=Kind(keep.kind),
            entry_bytes=keep.entry(known),
            heads=keep.heads(known),
            head_size=keep.head_size(known),
            dtype=self._dtype_label(keep.dtype),
            window=None if keep.window is None else keep.window(known),
            compression=keep.compression(known),
            grid=self.grain if keep.kind == "snapshot" else 1,
            role=keep.role,
            part=part,
            rank_rule=RankRule(keep.rank),
            follows=before[-1].name if sidecar else None,
        )

    def _dtype_label(self, dtype: str) -> str:
        if dtype == "kv":
            return self.kv_dtype
        if dtype == "state":
            both = (self.state_dtype, self.model_dtype)
            return "+".join(dict.fromkeys(both))
        return dtype

    def _follower(self, index: int, kind: KindOf, owners: list[KindOf]) -> LayerSpec:
        """A layer at the end that reuses the last earlier layer of its own kind."""
        source = next(
            (i for i in reversed(range(len(owners))) if owners[i].kind == kind.kind), None
        )
        if source is None:
            raise ConfigError(
                f"{self.path}: layer {index} reuses the KV of an earlier {kind.kind} layer, of which "
                "there is none"
            )
        return LayerSpec(index, f"layers.{index}", Kind.FOLLOWER, follows=f"layers.{source}")

    def _per_layer(self, running: int) -> dict[str, int]:
        values: dict[str, int] = {}
        for name, rule in self.rules.per_layer.items():
            listed = self.fields.published(rule.field)
            if listed is not None:
                values[name] = int(listed[running]) if running < len(listed) else rule.beyond
        return values


class _Required(dict[str, int]):
    """Formula names: numbers of this layer first, then fields, which must be there."""

    def __init__(self, fields: Fields, values: Mapping[str, int]) -> None:
        super().__init__(values)
        self._fields = fields

    def __missing__(self, name: str) -> int:
        return self._fields[name]


class _Optional(_Required):
    """For conditions: an absent field is 0."""

    def __missing__(self, name: str) -> int:
        if name not in self._fields:
            return 0
        return self._fields[name]


def _language_model(table: Rules, config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in table.nested:
        inner = config.get(key)
        if isinstance(inner, dict):
            return inner
    return config
