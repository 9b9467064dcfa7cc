"""The rule table ``rules.yaml`` as typed, checked data."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ucm_core.spec.from_config.formulas import Formula


def _formula(value: Any) -> Formula:
    return value if isinstance(value, Formula) else Formula(value)


FormulaField = Annotated[Formula, BeforeValidator(_formula)]
How = Literal["words", "chars", "values", "every", "period", "indices", "from", "all"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Pattern(_Strict):
    """How a published file says which kind each layer is; see the comments of the table."""

    how: How
    needs: tuple[str, ...] = ()
    unless_false: tuple[str, ...] = ()
    field: str = ""
    map: dict[str, str] = Field(default_factory=dict)
    as_: str = Field("", alias="as")
    kind: str = ""
    other: str = ""
    base: int = 0
    offset: str = ""


class Keep(_Strict):
    """One thing that a layer keeps."""

    kind: Literal["chain", "snapshot", "sidecar"]
    entry: FormulaField
    heads: FormulaField = Field(default_factory=lambda: Formula(1))
    head_size: FormulaField = Field(default_factory=lambda: Formula(1))
    window: FormulaField | None = None
    compression: FormulaField = Field(default_factory=lambda: Formula(1))
    role: str = ""
    dtype: str = "kv"
    rank: Literal["union", "intersection"] = "intersection"
    if_: FormulaField | None = Field(None, alias="if")


class Variant(_Strict):
    keeps: tuple[Keep, ...]
    needs: tuple[str, ...] = ()


class PerLayer(_Strict):
    field: str
    beyond: int = 0


class Rules(_Strict):
    """The whole table. Every kind that a pattern names exists, which the loader checks."""

    nested: tuple[str, ...]
    fields: dict[str, tuple[str, ...]]
    derived: dict[str, FormulaField]
    must_be_read: re.Pattern[str]
    may_be_ignored: re.Pattern[str]
    defaults: dict[str, dict[str, Any]]
    patterns: tuple[Pattern, ...]
    draft_kind: str
    per_layer: dict[str, PerLayer]
    kinds: dict[str, tuple[Variant, ...]]
    dtypes: dict[str, tuple[str, int]]
    default_dtype: str


@cache
def rules() -> Rules:
    """The table that ships with this package; read once per process."""
    text = resources.files(__package__).joinpath("rules.yaml").read_text(encoding="utf-8")
    table = Rules.model_validate(yaml.safe_load(text))
    named = {table.draft_kind}
    for pattern in table.patterns:
        named |= {pattern.kind, pattern.other, *pattern.map.values()} - {""}
    unknown = sorted(named - set(table.kinds))
    if unknown:
        raise ValueError(f"rules.yaml: patterns name the kinds {unknown}, which are not defined")
    return table
