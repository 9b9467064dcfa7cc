"""``ucm plugins``: what is installed, what became of it, and why."""

from __future__ import annotations

import json

import click
from rich.table import Table
from rich.text import Text

from ucm_core.cli.console import new_console
from ucm_core.plugins import PluginHost, PluginReport, PluginStatus

STYLES = {
    PluginStatus.LOADED: "green",
    PluginStatus.DISABLED: "dim",
    PluginStatus.INCOMPATIBLE: "yellow",
    PluginStatus.BROKEN: "red",
}


@click.command("plugins")
@click.option(
    "-v", "--verbose", is_flag=True, help="Also where each lies, and its own report lines."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def plugins_command(host: PluginHost, verbose: bool, as_json: bool) -> None:
    """List plugins with their status and, for those left out, the reason."""
    reports = host.reports
    if as_json:
        click.echo(json.dumps([_as_dict(report) for report in reports], indent=2))
        return
    console = new_console()
    table = Table("plugin", "status", "distribution", "provides", box=None, pad_edge=False)
    for report in reports:
        provides = ", ".join(f"{kind} {name}" for kind, name in report.provides)
        loaded = report.status is PluginStatus.LOADED
        table.add_row(
            Text(report.name),
            Text(report.status.value, STYLES[report.status]),
            Text(f"{report.distribution} {report.version}"),
            Text(provides if loaded else ""),
        )
    console.print(table)
    for report in reports:
        if report.reason:
            console.print(Text(f"{report.name}: {report.reason}"))
        if verbose:
            console.print(Text(f"{report.name}: {report.module} in {report.location}", "dim"))
    if verbose:
        for line in host.header_lines({"role": "tool", "engine": ""}):
            console.print(Text(line))
    if not any(stage.persistent for stage in host.stages.values()):
        console.print("no plugin offers storage that lasts; install ucm-backend-posix")


def _as_dict(report: PluginReport) -> dict[str, object]:
    return {
        "name": report.name,
        "status": report.status.value,
        "reason": report.reason,
        "distribution": report.distribution,
        "version": report.version,
        "module": report.module,
        "location": report.location,
        "provides": [list(pair) for pair in report.provides],
    }
