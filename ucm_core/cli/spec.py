"""``ucm spec``: what a model keeps, from its published ``config.json``, for planning."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from ucm_core.cli.console import new_console
from ucm_core.config.units import format_size
from ucm_core.spec import STORED, GroupSpec, Kind, Retention, SpecTable
from ucm_core.spec.coordinates import Stages
from ucm_core.spec.describe import layer_ranges
from ucm_core.spec.from_config import PublishedModel, read_model_config
from ucm_core.spec.sizes import MILLION, even_stages, live_bytes, rank_share, row_sizes


@click.command("spec")
@click.argument("config", type=click.Path())
@click.option("--tp", type=click.IntRange(1), default=1, help="Tensor-parallel size [1].")
@click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline-parallel size [1].")
@click.option(
    "--block-tokens", type=click.IntRange(1), default=64, help="Tokens of a stored block [64]."
)
@click.option("--kv-dtype", help="Element type of the KV cache [the model's].")
@click.option(
    "--interval", type=click.IntRange(1), help="Keep a checkpoint of states every so many tokens."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def spec_command(
    config: str,
    tp: int,
    pp: int,
    block_tokens: int,
    kv_dtype: str | None,
    interval: int | None,
    as_json: bool,
) -> None:
    """Print what the model of a config.json keeps: groups, units, bytes.

    CONFIG is a published config.json, or a directory that holds one.
    """
    model = read_model_config(config, kv_dtype=kv_dtype, grain=block_tokens)
    table = model.table(block_tokens, Retention(interval))
    stages = even_stages(table, pp)
    if as_json:
        click.echo(json.dumps(_as_dict(model, table, stages, tp), indent=2))
    else:
        _print(model, table, stages, tp)


def _print(model: PublishedModel, table: SpecTable, stages: Stages, tp: int) -> None:
    console = new_console()
    parts = ", ".join(f"{n} {part} layers" for part, n in table.num_layers.items())
    console.print(
        Text(
            f"{model.path}: {parts}; blocks of {table.grain} tokens, hits at multiples of "
            f"{table.common_grid}"
            + (f", checkpoints at multiples of {table.checkpoint_grid}" * bool(table.snapshots))
        )
    )
    head = (
        "group",
        "kind",
        "layers",
        "unit",
        "ranks",
        "block",
        "window",
        "B/token/layer",
        "B/token",
    )
    rows = Table(*head, "B/block", "1M stored", "1M needed", box=None, pad_edge=False)
    for row in table.rows:
        rows.add_row(*(Text(cell) for cell in _cells(row)))
    console.print(rows)
    _print_sums(console, table)
    for i in range(len(stages["target"])):
        console.print(Text(_stage_line(table, stages, i, tp)))
    for warning in table.warnings:
        console.print(Text(f"warning: {warning}", "yellow"))


def _cells(row: GroupSpec) -> tuple[str, ...]:
    layers = f"{len(row.layers)}: {layer_ranges(row.layers, shown=6)}"
    kind = row.kind.value if row.follows is None else f"{row.kind.value} of {row.follows}"
    if row.kind not in STORED:
        return (row.name, kind, layers, *["-"] * 9)
    sizes = row_sizes(row)
    state = row.kind is Kind.SNAPSHOT
    return (
        row.name,
        kind,
        layers,
        row.unit.value,
        row.rank_rule.value,
        str(row.block_tokens),
        "-" if row.window is None else str(row.window),
        f"{_number(row.bytes_per_token)} a state" if state else _number(row.bytes_per_token),
        "-" if state else _number(sizes.per_token),
        f"{sizes.per_block} a state" if state else str(sizes.per_block),
        f"{format_size(sizes.per_million)} a checkpoint"
        if state
        else format_size(sizes.per_million),
        format_size(_needed(row)),
    )


def _needed(row: GroupSpec) -> int:
    """Bytes to continue at the last block boundary of 10^6 tokens."""
    return live_bytes(row, MILLION // max(row.block_tokens, 1) * max(row.block_tokens, 1))


def _print_sums(console: Any, table: SpecTable) -> None:
    chains = [row_sizes(row) for row in table.rows if row.kind is not Kind.SNAPSHOT]
    states = [row_sizes(row).per_block for row in table.snapshots]
    console.print(
        Text(
            f"in all: {_number(sum((s.per_token for s in chains), Fraction(0)))} bytes a token, "
            f"{format_size(sum(s.per_million for s in chains))} for 1M tokens"
            + (f", and {format_size(sum(states))} a checkpoint" if states else "")
        )
    )


def _stage_line(table: SpecTable, stages: Stages, i: int, tp: int) -> str:
    held = {part: set(cut[i]) for part, cut in stages.items()}
    per_token, per_state = _rank_bytes(table, held, tp)
    layers = ", ".join(
        f"{part} {layer_ranges(tuple(sorted(numbers)))}"
        for part, numbers in held.items()
        if numbers
    )
    state = f", {format_size(per_state)} a checkpoint" if per_state else ""
    units = sum(len(held[row.part] & set(row.layers)) for row in table.rows if row.kind in STORED)
    what = f"{units} units, {_number(per_token)} bytes a token{state}"
    return f"stage {i} ({layers}), each of {tp} ranks: {what}"


def _rank_bytes(table: SpecTable, held: dict[str, set[int]], tp: int) -> tuple[Fraction, int]:
    shares = [(row, rank_share(row, held[row.part], tp)) for row in table.rows]
    per_token = sum((per for _, (per, _) in shares), Fraction(0))
    return per_token, sum(size for row, (_, size) in shares if row.kind is Kind.SNAPSHOT)


def _as_dict(model: PublishedModel, table: SpecTable, stages: Stages, tp: int) -> dict[str, Any]:
    ranks = []
    for i in range(len(stages["target"])):
        held = {part: set(cut[i]) for part, cut in stages.items()}
        per_token, per_state = _rank_bytes(table, held, tp)
        ranks.append(
            {
                "layers": {part: sorted(numbers) for part, numbers in held.items()},
                "bytes_per_token": float(per_token),
                "bytes_per_checkpoint": per_state,
            }
        )
    return {
        "path": model.path,
        "kv_dtype": model.kv_dtype,
        "num_layers": dict(table.num_layers),
        "block_tokens": table.grain,
        "common_grid": table.common_grid,
        "checkpoint_grid": table.checkpoint_grid,
        "tp": tp,
        "groups": [_group(row) for row in table.rows],
        "stages": ranks,
        "warnings": list(table.warnings),
    }


def _group(row: GroupSpec) -> dict[str, Any]:
    sizes = row_sizes(row)
    return {
        "name": row.name,
        "kind": row.kind.value,
        "part": row.part,
        "layers": list(row.layers),
        "follows": row.follows,
        "unit": row.unit.value,
        "rank_rule": row.rank_rule.value,
        "block_tokens": row.block_tokens,
        "window": row.window,
        "compression": row.compression,
        "heads": row.heads,
        "head_size": row.head_size,
        "dtype": row.dtype,
        "entry_bytes": row.entry_bytes,
        "bytes_per_token": float(sizes.per_token),
        "bytes_per_block": sizes.per_block,
        "bytes_per_million_tokens": sizes.per_million,
        "bytes_needed_at_a_million": _needed(row),
    }


def _number(value: Fraction) -> str:
    return str(int(value)) if value.denominator == 1 else f"{float(value):.2f}"
