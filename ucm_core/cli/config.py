"""``ucm config``: what would be used, where each value came from, and the memory it adds up to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from ucm_core.cli.console import new_console
from ucm_core.config.load import load_config
from ucm_core.config.machine import Machine
from ucm_core.config.model import UcmConfig
from ucm_core.config.schema import json_schema, reference_page
from ucm_core.config.units import format_size
from ucm_core.errors import ConfigError
from ucm_core.plugins import PluginHost
from ucm_core.registry import HostMemory


@click.command("config")
@click.option("--file", "file", type=click.Path(), help="A YAML file instead of UCM_CONFIG_FILE.")
@click.option("--inline", metavar="JSON", help="Keys as in vLLM's kv_connector_extra_config.")
@click.option("--ranks", type=click.IntRange(1), default=1, help="Workers on this node [1].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of the file, and nothing else.")
@click.option("--reference", is_flag=True, help="Print the reference page of all options.")
@click.pass_obj
def config_command(
    host: PluginHost,
    file: str | None,
    inline: str | None,
    ranks: int,
    as_json: bool,
    schema: bool,
    reference: bool,
) -> None:
    """Print the effective configuration; exits 1 and lists every problem when it is wrong."""
    if schema:
        click.echo(json.dumps(json_schema(host), indent=2))
        return
    if reference:
        click.echo(reference_page(host), nl=False)
        return
    config = load_config(extra_keys(file, inline), host=host)
    memory = host_memory(config, host)
    if as_json:
        click.echo(json.dumps(_as_dict(config, memory, ranks), indent=2))
    else:
        _print(config, memory, ranks)


def host_memory(config: UcmConfig, host: PluginHost) -> dict[str, HostMemory]:
    """What each part will allocate in host memory, by part."""
    parts = {}
    for name, options in config.stages.items():
        tell = host.stage(name).host_memory
        if tell is not None:
            parts[f"stage {name}"] = tell(options)
    if not any(part.per_node_bytes or part.per_rank_bytes for part in parts.values()):
        # A stage with memory of its own (the host cache) replaces the staging buffers.
        parts["staging buffers"] = HostMemory(per_rank_bytes=config.store.staging_buffer_gb)
    return parts


def extra_keys(file: str | None, inline: str | None) -> dict[str, Any]:
    """What a server would find inline, from the options ``--file`` and ``--inline``."""
    extra: dict[str, Any] = {}
    if inline is not None:
        try:
            extra = json.loads(inline)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--inline is not JSON: {error}") from error
        if not isinstance(extra, dict):
            raise ConfigError(f"--inline must be a JSON object, got {inline}")
    if file is not None:
        extra["UCM_CONFIG_FILE"] = file
    return extra


def _print(config: UcmConfig, memory: Mapping[str, HostMemory], ranks: int) -> None:
    console = new_console()
    table = Table("section", "option", "value", "source", box=None, pad_edge=False)
    table.columns[1].no_wrap = True
    for entry in config.entries():
        style = "dim" if entry.source == "default" else ""
        cells = (entry.section, entry.key, entry.shown, entry.source)
        table.add_row(*(Text(cell, style) for cell in cells))
    console.print(table)
    console.print()
    per_rank, per_node = _sums(memory)
    for part, need in memory.items():
        console.print(Text(f"host memory of {part}: {_describe(need)}"))
    total = per_node + ranks * per_rank
    available = Machine.measure().available_memory_bytes
    console.print(
        Text(
            f"host memory in all, {ranks} worker(s) on this node: {format_size(total)} "
            f"(available now: {format_size(available)})"
        )
    )
    if total > available:
        console.print(Text("that is more than this machine has available", "red"))
    for warning in config.warnings:
        console.print(Text(f"warning: {warning}", "yellow"))


def _describe(need: HostMemory) -> str:
    return f"{format_size(need.per_rank_bytes)} per worker, {format_size(need.per_node_bytes)} per node"


def _sums(memory: Mapping[str, HostMemory]) -> tuple[int, int]:
    return (
        sum(need.per_rank_bytes for need in memory.values()),
        sum(need.per_node_bytes for need in memory.values()),
    )


def _as_dict(config: UcmConfig, memory: Mapping[str, HostMemory], ranks: int) -> dict[str, Any]:
    per_rank, per_node = _sums(memory)
    return {
        "origin": config.origin,
        "options": [
            {
                "section": entry.section,
                "option": entry.key,
                "value": _plain(entry.value),
                "source": entry.source,
            }
            for entry in config.entries()
        ],
        "host_memory": {
            "per_rank_bytes": per_rank,
            "per_node_bytes": per_node,
            "ranks": ranks,
            "total_bytes": per_node + ranks * per_rank,
        },
        "warnings": list(config.warnings),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
