"""Every hook of the plugin system, one file. Control plane only: blocks never pass through hooks.

A plugin is a module named by an entry point of the group ``ucm``. It sets ``UCM_API_VERSION`` to the
version it was built for and implements hooks with ``@hookimpl``. Hooks register typed specs; the
objects that move bytes are built by the specs' factories. A hook evolves by gaining arguments:
pluggy lets an implementation name only those it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from ucm_core.registry import (
        DeviceSpec,
        EngineSpec,
        PipelineSpec,
        RetentionSpec,
        StageSpec,
    )

#: (major, minor) of the plugin interface. A plugin fits when its major is ours and its minor is not
#: above ours.
API_VERSION: tuple[int, int] = (1, 1)

ENTRY_POINT_GROUP = "ucm"
PROJECT = "ucm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def ucm_register_stages(register: Callable[[StageSpec], None]) -> None:
    """Offer storage stages. Call ``register`` once per stage; a duplicate name is an error."""


@hookspec
def ucm_register_pipelines(register: Callable[[PipelineSpec], None]) -> None:
    """Offer named stacks of stages, top to bottom. Stages may come from other plugins."""


@hookspec
def ucm_register_engines(register: Callable[[EngineSpec], None]) -> None:
    """Offer engine adapters."""


@hookspec
def ucm_register_retention(register: Callable[[RetentionSpec], None]) -> None:
    """Offer rules that decide where checkpoints of recurrent states are made. Since 1.1."""


@hookspec
def ucm_register_devices(register: Callable[[DeviceSpec], None]) -> None:
    """Offer kinds of engine memory: how bytes are copied to and from them, in order with the engine.

    Since 1.1.
    """


@hookspec
def ucm_register_commands(cli: click.Group) -> None:
    """Add subcommands to the ``ucm`` command."""


@hookspec
def ucm_report_header(context: Mapping[str, str]) -> str | list[str] | None:
    """Lines for the start-up report and ``ucm plugins -v``. ``context`` names engine and role."""


@hookspec
def ucm_startup(context: Mapping[str, str]) -> None:
    """Called once per process when a plugin host has finished loading."""


@hookspec
def ucm_shutdown() -> None:
    """Called when the host closes; release what ``ucm_startup`` took."""
