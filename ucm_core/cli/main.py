"""The command group: our subcommands and those of plugins, and how errors end."""

from __future__ import annotations

import logging
import sys

import click

from ucm_core import __version__
from ucm_core.cli.check import check_command
from ucm_core.cli.config import config_command
from ucm_core.cli.plugins import plugins_command
from ucm_core.cli.spec import spec_command
from ucm_core.errors import UcmError
from ucm_core.plugins import PluginHost


def build_cli() -> click.Group:
    """A new command group with our own subcommands; plugins add theirs to it."""

    @click.group(context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__, prog_name="ucm")
    def cli() -> None:
        """Look at a UCM installation, and plan what a model will keep."""

    cli.add_command(plugins_command)
    cli.add_command(config_command)
    cli.add_command(check_command)
    cli.add_command(spec_command)
    return cli


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script; an error of ours is one message and exit code 1."""
    log = logging.StreamHandler()
    log.setLevel(logging.ERROR)  # what is left out is listed by the commands themselves
    logging.getLogger("ucm").addHandler(log)
    host = PluginHost()
    cli = build_cli()
    try:
        host.add_commands(cli)
        # In this mode the exit code of --help and the like is returned.
        code = cli.main(arguments, prog_name="ucm", standalone_mode=False, obj=host)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except UcmError as error:
        click.echo(f"ucm: {error}", err=True)
        return 1
    finally:
        host.close()
        logging.getLogger("ucm").removeHandler(log)
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
