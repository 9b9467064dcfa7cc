"""Load one plugin: import it, check its version and hooks, collect what it registers.

Everything here either succeeds whole or raises a ``PluginError``; nothing of a plugin that fails
is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pluggy
from pydantic import BaseModel

from ucm_core import hookspecs
from ucm_core.errors import PluginError, PluginLoadError, PluginVersionError
from ucm_core.names import nearest
from ucm_core.plugins.discover import Candidate
from ucm_core.plugins.report import describe_error
from ucm_core.registry import DeviceSpec, EngineSpec, PipelineSpec, RetentionSpec, StageSpec

Trace = Callable[[str], None]

#: kind -> (hook that registers it, type of its spec)
KINDS: dict[str, tuple[str, type]] = {
    "stage": ("ucm_register_stages", StageSpec),
    "pipeline": ("ucm_register_pipelines", PipelineSpec),
    "engine": ("ucm_register_engines", EngineSpec),
    "retention": ("ucm_register_retention", RetentionSpec),
    "device": ("ucm_register_devices", DeviceSpec),
}

HOOK_NAMES = tuple(name for name in vars(hookspecs) if name.startswith("ucm_"))


@dataclass(slots=True)
class LoadedPlugin:
    """A plugin that passed every check. ``hooks`` calls this plugin's implementations alone, so
    that one plugin's hook wrappers have no power over another's."""

    candidate: Candidate
    module: Any
    hooks: pluggy.HookRelay
    implemented: tuple[str, ...]
    specs: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Attempt:
    """What a plugin registered so far; kept for the report when it fails later."""

    provided: list[tuple[str, str]] = field(default_factory=list)


def load_plugin(candidate: Candidate, attempt: Attempt, trace: Trace) -> LoadedPlugin:
    """Load ``candidate``; raises ``PluginLoadError`` or ``PluginVersionError`` with the cause.

    ``KeyboardInterrupt`` passes; every other exception of the plugin, ``SystemExit`` included,
    becomes a ``PluginLoadError``.
    """
    if candidate.problem or candidate.entry_point is None:
        raise PluginLoadError(candidate.problem or "has no entry point")
    trace(f"{candidate.name}: importing {candidate.value} from {candidate.location}")
    module = guarded("import failed", candidate.entry_point.load)
    guarded("its UCM_API_VERSION cannot be used", lambda: _check_version(module))
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    guarded("its hooks do not fit", lambda: _register_hooks(manager, module, candidate.name))
    plugin = LoadedPlugin(candidate, module, manager.hook, _implemented(manager, module))
    for kind, (hook, spec_type) in KINDS.items():
        if hook in plugin.implemented:
            trace(f"{candidate.name}: calling {hook}")
            plugin.specs[kind] = _collect(plugin, kind, hook, spec_type, attempt)
    return plugin


def guarded(what: str, call: Callable[[], Any]) -> Any:
    """Run a plugin's code; whatever it raises becomes a ``PluginError`` that names the cause."""
    try:
        return call()
    except (KeyboardInterrupt, PluginError):
        raise
    except BaseException as error:  # SystemExit of a plugin must not end the server
        raise PluginLoadError(f"{what}: {describe_error(error)}") from error


def _check_version(module: Any) -> None:
    if not isinstance(module, ModuleType):
        raise PluginLoadError(
            f"the entry point must name a module, got {type(module).__name__}; "
            "write `name = package.module`, without `:object`"
        )
    declared = getattr(module, "UCM_API_VERSION", None)
    major, minor = hookspecs.API_VERSION
    if declared is None:
        raise PluginVersionError(
            f"declares no UCM_API_VERSION; this core speaks plugin API {major}.{minor}, so a plugin "
            f"written for it says UCM_API_VERSION = ({major}, {minor})"
        )
    fits = (
        isinstance(declared, tuple)
        and len(declared) == 2
        and all(type(part) is int for part in declared)
    )
    if not fits:
        raise PluginLoadError(f"UCM_API_VERSION must be a pair of integers, got {declared!r}")
    if declared[0] != major or declared[1] > minor:
        raise PluginVersionError(
            f"was built for plugin API {declared[0]}.{declared[1]}, this core speaks {major}.{minor}; "
            "install a release of the plugin or of ucm-core that match"
        )


def _register_hooks(manager: pluggy.PluginManager, module: Any, name: str) -> None:
    manager.register(module, name=name)
    for hook in HOOK_NAMES:
        function = getattr(module, hook, None)
        if function is None:
            continue
        if not hasattr(function, f"{hookspecs.PROJECT}_impl"):
            raise PluginLoadError(f"{hook} is defined but not marked with @hookimpl")
        if inspect.iscoroutinefunction(function):
            raise PluginLoadError(f"{hook} is async; hooks are plain functions")
    for plugin_hook in manager.get_hookcallers(module) or []:
        if not plugin_hook.has_spec():
            hint = nearest(plugin_hook.name, HOOK_NAMES)
            raise PluginLoadError(f"implements unknown hook {plugin_hook.name}{hint}")


def _implemented(manager: pluggy.PluginManager, module: Any) -> tuple[str, ...]:
    return tuple(sorted(hook.name for hook in manager.get_hookcallers(module) or []))


def _collect(
    plugin: LoadedPlugin, kind: str, hook: str, spec_type: type, attempt: Attempt
) -> list[Any]:
    collected: list[Any] = []
    open_for_registration = True

    def register(spec: Any) -> None:
        if not open_for_registration:
            raise PluginLoadError(f"{hook}: registration is over; call register inside the hook")
        if not isinstance(spec, spec_type):
            raise PluginLoadError(f"{hook} needs a {spec_type.__name__}, got {spec!r}")
        collected.append(spec)
        attempt.provided.extend((kind, name) for name in spec_names(spec))
        check_spec(spec)

    try:
        results = guarded(f"{hook} failed", lambda: getattr(plugin.hooks, hook)(register=register))
    finally:
        open_for_registration = False
    if results:
        raise PluginLoadError(f"{hook} must return None and call register, returned {results[0]!r}")
    return collected


def spec_names(spec: Any) -> tuple[str, ...]:
    """The name of a spec and its aliases."""
    return (spec.name, *getattr(spec, "aliases", ()))


def check_spec(spec: Any) -> None:
    """Refuse a spec that could not work later; raises ``PluginLoadError``."""
    kind = type(spec).__name__
    for name in spec_names(spec):
        if not isinstance(name, str) or not name or name != name.strip():
            raise PluginLoadError(f"{kind}: a name must be a non-empty string, got {name!r}")
    if isinstance(spec, StageSpec):
        if "|" in spec.name:
            raise PluginLoadError(f"stage {spec.name!r}: '|' separates stages, a name has none")
        model = spec.config_model
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginLoadError(
                f"stage {spec.name!r}: config_model must be a pydantic model, got {model!r}"
            )
        if not callable(spec.build):
            raise PluginLoadError(f"stage {spec.name!r}: build must be callable")
    elif isinstance(spec, RetentionSpec):
        if not callable(spec.build):
            raise PluginLoadError(f"retention {spec.name!r}: build must be callable")
    elif isinstance(spec, PipelineSpec):
        stages = spec.stages
        if not isinstance(stages, tuple) or not stages or not all(map(_is_name, stages)):
            raise PluginLoadError(f"pipeline {spec.name!r}: stages must be a tuple of stage names")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)
