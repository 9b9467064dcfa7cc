"""Small spec tables for the tests of the coordinator."""

from __future__ import annotations

from typing import Any

from ucm_core.spec import GroupSpec, Kind, RankRule, SpecTable


def chain(name: str, block: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "kind": Kind.CHAIN, "block_tokens": block, **fields}


def state(name: str, grid: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "kind": Kind.SNAPSHOT, "block_tokens": grid, **fields}


def table(*rows: dict[str, Any], grain: int = 1) -> SpecTable:
    """One layer a row."""
    specs = [
        GroupSpec(
            layers=(i,),
            **{"entry_bytes": 8, "unit": "window" if row.get("window") else "layer", **row},
        )
        for i, row in enumerate(rows)
    ]
    return SpecTable(specs, grain=grain, num_layers=len(specs))


UNION, INTERSECTION = RankRule.UNION, RankRule.INTERSECTION
