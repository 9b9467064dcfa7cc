"""Collects tables and targets; prints them and renders ``docs/benchmarks.md``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Sense = Literal["at most", "at least"]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that was promised: what, the bound, and what this run measured."""

    what: str
    sense: Sense
    bound: float
    measured: float
    unit: str = "x"

    @property
    def met(self) -> bool:
        if self.sense == "at most":
            return self.measured <= self.bound
        return self.measured >= self.bound

    def row(self) -> list[str]:
        goal = f"{self.sense} {self.bound:g} {self.unit}"
        return [
            self.what,
            goal,
            f"{self.measured:.3g} {self.unit}",
            "yes" if self.met else "**no**",
        ]


@dataclass(frozen=True, slots=True)
class Table:
    """One table with a sentence or two on how its figures were taken."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> list[str]:
        lines = [f"### {self.title}", ""]
        if self.note:
            lines += [self.note, ""]
        lines.append(_line(self.columns))
        lines.append("|" + "---|" * len(self.columns))
        lines += [_line(row) for row in self.rows]
        return [*lines, ""]

    def text(self) -> str:
        widths = [
            max(len(cell) for cell in column)
            for column in zip(self.columns, *self.rows, strict=True)
        ]
        out = [f"\n{self.title}", *([self.note] if self.note else [])]
        for row in [self.columns, *self.rows]:
            cells = [
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            out.append("  ".join(cells).rstrip())
        return "\n".join(out)


def _line(cells: Sequence[str]) -> str:
    """A row of a Markdown table; pipelines are named with the character that separates cells."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(slots=True)
class Report:
    """Grows while the benchmarks run; every table is printed as soon as it is there."""

    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def table(self, table: Table) -> None:
        self.tables.append(table)
        print(table.text(), flush=True)

    def target(self, target: Target) -> None:
        self.targets.append(target)

    def skip(self, what: str, reason: str) -> None:
        """Say that something was not measured; never silently."""
        self.missing.append(f"{what}: {reason}")
        print(f"\nnot measured: {what}: {reason}", flush=True)

    def targets_table(self) -> Table:
        rows = [t.row() for t in self.targets]
        return Table("Targets", ("target", "wanted", "measured", "met"), rows)

    def markdown(self, machine: Sequence[tuple[str, str]]) -> str:
        lines = [
            "# Benchmarks",
            "",
            "Written by `make bench`; do not edit. Figures compare inside one table only: every",
            "ratio is the median of per-round ratios of repetitions that ran in turns in this run.",
            "CPU time is that of all threads (getrusage). How each figure is taken:",
            "`benchmarks/README.md`.",
            "",
            "| machine | |",
            "|---|---|",
            *(f"| {what} | {value} |" for what, value in machine),
            "",
        ]
        if self.targets:
            lines += self.targets_table().markdown()
        if self.missing:
            lines += ["### Not measured in this run", ""]
            lines += [*(f"- {line}" for line in self.missing), ""]
        for table in self.tables:
            lines += table.markdown()
        return "\n".join(lines)
