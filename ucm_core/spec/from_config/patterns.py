"""From a pattern of the rule table to the kind of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.spec.from_config.fields import Fields
from ucm_core.spec.from_config.rules import Pattern, Rules


@dataclass(frozen=True, slots=True)
class KindOf:
    """The kind of one layer, and the numbers that its list gave for formulas."""

    kind: str
    numbers: dict[str, int] = field(default_factory=dict)


def layer_kinds(rules: Rules, fields: Fields, layers: int, drafts: int) -> list[KindOf]:
    """One entry per layer of the target, then one per draft layer.

    A list of exactly ``layers + drafts`` entries names the kinds of the draft layers too; every other
    length that is not ``layers`` is refused (ConfigError), and so is a word that no rule knows.
    """
    pattern = next(p for p in rules.patterns if _applies(p, fields))
    found = _kinds(pattern, fields, layers)
    if len(found) not in (layers, layers + drafts):
        extra = f" (or {layers + drafts} with its {drafts} draft layers)" if drafts else ""
        raise ConfigError(
            f"{fields.where}: {pattern.field} names {len(found)} layers, but the model has "
            f"{layers}{extra}; nothing is cut or padded"
        )
    missing = layers + drafts - len(found)
    return found + [KindOf(rules.draft_kind) for _ in range(missing)]


def _applies(pattern: Pattern, fields: Fields) -> bool:
    needed = all(fields.published(name) for name in pattern.needs)
    return needed and not any(fields.published(name) is False for name in pattern.unless_false)


def _kinds(pattern: Pattern, fields: Fields, layers: int) -> list[KindOf]:
    value: Any = fields.published(pattern.field) if pattern.field else None
    if pattern.how in ("words", "chars", "values"):
        return [_mapped(pattern, fields, entry) for entry in value]
    chosen: set[int]
    if pattern.how == "all":
        chosen = set(range(layers))
    elif pattern.how == "every":
        chosen = {i for i in range(layers) if (i + 1) % _count(pattern, fields, value) == 0}
    elif pattern.how == "period":
        offset = fields.published(pattern.offset) or 0
        chosen = {i for i in range(layers) if i % _count(pattern, fields, value) == offset}
    elif pattern.how == "from":
        chosen = set(range(_count(pattern, fields, value), layers))
    else:
        chosen = _indices(pattern, fields, value, layers)
    return [KindOf(pattern.kind if i in chosen else pattern.other) for i in range(layers)]


def _mapped(pattern: Pattern, fields: Fields, entry: Any) -> KindOf:
    any_other = pattern.map.get("*") if pattern.how == "values" else None
    kind = pattern.map.get(str(entry), any_other)
    if kind is None:
        raise ConfigError(
            f"{fields.where}: {pattern.field} names a layer {entry!r}, which no rule knows; known are "
            f"{', '.join(pattern.map)}. What such a layer keeps is never guessed"
        )
    return KindOf(kind, {pattern.as_: int(entry)} if pattern.as_ else {})


def _count(pattern: Pattern, fields: Fields, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{fields.where}: {pattern.field} must be at least 1, got {value!r}")
    return value


def _indices(pattern: Pattern, fields: Fields, value: Sequence[int], layers: int) -> set[int]:
    chosen = {int(i) - pattern.base for i in value}
    if chosen - set(range(layers)):
        raise ConfigError(
            f"{fields.where}: {pattern.field} names layers beyond the {layers} there are: {value}"
        )
    return chosen
