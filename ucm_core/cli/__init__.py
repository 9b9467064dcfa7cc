"""The ``ucm`` command."""

from ucm_core.cli.main import build_cli, main

__all__ = ["build_cli", "main"]
