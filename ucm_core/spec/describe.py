"""The spec table as text, for start-up reports and ``ucm spec``."""

from __future__ import annotations

from ucm_core.identity.seed import runs
from ucm_core.spec.group import GroupSpec
from ucm_core.spec.kinds import STORED, Kind
from ucm_core.spec.table import SpecTable

HEADER = ("name", "kind", "block", "layers", "bytes/token", "window", "ranks", "unit", "store")


def cells(row: GroupSpec) -> tuple[str, ...]:
    """One row, by :data:`HEADER`."""
    stored = row.kind in STORED
    kind = row.kind.value if row.follows is None else f"{row.kind.value} of {row.follows}"
    size = row.bytes_per_token
    per = str(int(size)) if size.denominator == 1 else f"{float(size):g}"
    per += " a state" if row.kind is Kind.SNAPSHOT else ""
    return (
        row.name,
        kind,
        str(row.block_tokens) if stored else "-",
        f"{len(row.layers)} ({layer_ranges(row.layers)})",
        per if stored else "-",
        str(row.window) if row.window is not None else "-",
        row.rank_rule.value if stored else "-",
        row.unit.value if stored else "-",
        row.store or "-",
    )


def describe(table: SpecTable) -> list[str]:
    """Aligned lines: header, rows, then warnings."""
    lines = [HEADER, *(cells(row) for row in table.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    text = [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return text + [f"warning: {warning}" for warning in table.warnings]


def layer_ranges(layers: tuple[int, ...], shown: int = 4) -> str:
    """``0-2,5``; of more than ``shown`` ranges the first ones."""
    parts = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in runs(layers)]
    return ",".join(parts[:shown]) + (",..." if len(parts) > shown else "")
