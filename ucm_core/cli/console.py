"""Where commands print: tables fit a terminal, and are whole in a file or a pipe."""

from __future__ import annotations

import sys

from rich.console import Console


def new_console() -> Console:
    """A console on stdout; in a pipe it is wide enough to wrap nothing, so that lines can be grepped."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 10_000)
