"""Load the configuration: everything is checked, and every problem is listed at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ucm_core.config import reference
from ucm_core.config.machine import Machine
from ucm_core.config.model import UcmConfig
from ucm_core.config.options import CoreOptions, Options
from ucm_core.config.reading import join_problems, read_config
from ucm_core.config.split import SplitConfig, Value, split
from ucm_core.errors import ConfigError, PluginError
from ucm_core.names import nearest
from ucm_core.plugins import PluginHost
from ucm_core.registry import PipelineSpec
from ucm_core.store.config import StoreConfig

M = TypeVar("M", bound=BaseModel)

#: The zero-option start takes the first of these that is installed.
DEFAULT_PIPELINES = ("Cache|Posix", "Posix")
ROOTS_KEY = "storage_backends"


def default_storage_directory(env: Mapping[str, str]) -> Path:
    """Where blocks go when nothing is configured: ``${XDG_CACHE_HOME:-~/.cache}/ucm/kv``."""
    base = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME") or "~", ".cache")
    return Path(base).expanduser() / "ucm" / "kv"


def load_config(
    extra_config: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    host: PluginHost | None = None,
    *,
    foreign_keys: frozenset[str] = frozenset(),
    machine: Machine | None = None,
    default_pipelines: Sequence[str] | None = None,
) -> UcmConfig:
    """The effective configuration; raises ``ConfigError`` whose ``problems`` lists all that is wrong.

    ``extra_config`` are the engine's inline keys (vLLM: ``kv_connector_extra_config``), of which
    ``foreign_keys`` belong to the engine. ``env`` defaults to the process's environment, ``host`` to
    a new plugin host over it; ``default_pipelines``: the first that is installed serves where none is
    named (None: DEFAULT_PIPELINES). Reads files, allocates nothing, writes nothing.
    """
    env = os.environ if env is None else env
    host = PluginHost(env) if host is None else host
    measured = Machine.measure() if machine is None else machine
    loader = _Loader(host, measured, default_pipelines or DEFAULT_PIPELINES)
    raw = read_config(extra_config, env, foreign_keys)
    config = loader.build(split(raw, loader.top_names, loader.problems), raw.origin, env)
    if loader.problems or config is None:
        raise ConfigError(join_problems(raw.origin, loader.problems), tuple(loader.problems))
    return config


class _Loader:
    """State of one load: problems, warnings and sources found so far."""

    def __init__(
        self, host: PluginHost, machine: Machine, default_pipelines: Sequence[str]
    ) -> None:
        self.host = host
        self.default_pipelines = default_pipelines
        self.machine = machine
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.sources: dict[tuple[str, str], str] = {}
        self.top_names = frozenset(CoreOptions.model_fields)

    def build(self, keys: SplitConfig, origin: str, env: Mapping[str, str]) -> UcmConfig | None:
        pipeline = self._pipeline(keys)
        stages = [] if pipeline is None else [self.host.stage(name) for name in pipeline.stages]
        models: dict[str, type[BaseModel]] = {s.name: s.config_model for s in stages}
        self._roots(keys, models, env)
        self._sort_out(keys, models)
        core = self._validate("core", CoreOptions, keys.top)
        store = self._validate("store", StoreConfig, keys.store)
        options = {name: self._validate(name, model, keys.store) for name, model in models.items()}
        if core is not None:
            self._refuse_not_built(core, keys)
            self._retention(core, keys)
        if self.problems or pipeline is None or core is None or store is None:
            return None
        done = {name: model for name, model in options.items() if model is not None}
        return UcmConfig(
            core=core,
            store=store,
            pipeline=pipeline,
            stages=MappingProxyType(done),
            origin=origin,
            sources=MappingProxyType(self.sources),
            warnings=tuple(self.warnings),
        )

    # -- pipeline --------------------------------------------------------------------------------

    def _pipeline(self, keys: SplitConfig) -> PipelineSpec | None:
        given = keys.pipeline
        if given is None and keys.explicit:
            known = ", ".join(sorted(self.host.pipelines)) or "none"
            self.problems.append(f"store_pipeline: required with ucm_connectors; known: {known}")
            return None
        if given is None:
            return self._default_pipeline()
        if not isinstance(given.value, str):
            self.problems.append(
                f"{given.name} ({given.source}): expected a name, got {given.value!r}"
            )
            return None
        self.sources["pipeline", "store_pipeline"] = given.source
        try:
            return self.host.pipeline(given.value)
        except PluginError as error:
            hint = reference.PIPELINE_HINTS.get(given.value)
            text = f"pipeline '{given.value}' {hint}; {error}" if hint else str(error)
            self.problems.append(f"{given.name} ({given.source}): {text}")
            return None

    def _default_pipeline(self) -> PipelineSpec | None:
        error: PluginError | None = None
        for name in self.default_pipelines:
            try:
                found = self.host.pipeline(name)
            except PluginError as caught:
                error = caught
                continue
            if error is not None:
                self.warnings.append(f"the default pipeline is '{name}' here, because {error}")
            return found
        self.problems.append(
            f"no default pipeline is installed; install ucm-backend-posix or set store_pipeline: {error}"
        )
        return None

    def _roots(
        self, keys: SplitConfig, models: Mapping[str, type[BaseModel]], env: Mapping[str, str]
    ) -> None:
        wanted = any(ROOTS_KEY in model.model_fields for model in models.values())
        if not wanted or ROOTS_KEY in keys.store:
            return
        if keys.explicit:
            self.problems.append(
                f"{ROOTS_KEY}: required, one or more directories separated by ':' "
                "(only a start without any store option chooses one)"
            )
            # A stand-in, so that the other options are still checked.
            keys.store[ROOTS_KEY] = Value("/", "", ROOTS_KEY)
            return
        directory = str(default_storage_directory(env))
        keys.store[ROOTS_KEY] = Value(directory, "chosen: the default directory", ROOTS_KEY)

    # -- keys ------------------------------------------------------------------------------------

    def _sort_out(self, keys: SplitConfig, models: Mapping[str, type[BaseModel]]) -> None:
        """Report every key that no model takes; nothing of the operator's is dropped silently."""
        for key in list(keys.top):
            if key in reference.HARMLESS_TOP_KEYS:
                self._warn(keys.top.pop(key), reference.HARMLESS_TOP_KEYS[key])
            elif key in reference.REFUSED_TOP_KEYS:
                self._problem(keys.top.pop(key), reference.REFUSED_TOP_KEYS[key])
        taken = set(StoreConfig.model_fields)
        for model in models.values():
            taken |= set(model.model_fields)
        for key, value in list(keys.store.items()):
            if key not in taken:
                del keys.store[key]
                self._unknown_store_key(key, value, taken)

    def _unknown_store_key(self, key: str, value: Value, taken: set[str]) -> None:
        elsewhere = [n for n, s in self.host.stages.items() if key in s.config_model.model_fields]
        if elsewhere:
            why = f"belongs to stage {', '.join(elsewhere)}, which this pipeline does not have"
            self._warn(value, why)
        elif key in reference.NOT_BUILT:
            off, why = reference.NOT_BUILT[key]
            if value.value not in off:
                self._problem(value, f"{why} (got {value.value!r}); remove it or set {off[0]!r}")
        elif key in reference.HARMLESS_STORE_KEYS:
            self._warn(value, reference.HARMLESS_STORE_KEYS[key])
        else:
            known = taken | self.top_names | {"store_pipeline"}
            self._problem(value, f"unknown key{nearest(key, known)}")

    def _refuse_not_built(self, core: CoreOptions, keys: SplitConfig) -> None:
        for key, (off, why) in reference.NOT_BUILT.items():
            if key in keys.top and getattr(core, key) not in off:
                self._problem(keys.top[key], f"{why}; remove it or set {off[0]!r}")

    def _retention(self, core: CoreOptions, keys: SplitConfig) -> None:
        given = keys.top.get("retention_rule")
        if given is not None:
            try:
                self.host.retention(core.retention_rule)
            except PluginError as error:
                self._problem(given, str(error))

    def _warn(self, value: Value, why: str) -> None:
        self.warnings.append(f"{value.name} ({value.source}) has no effect: {why}")

    def _problem(self, value: Value, why: str) -> None:
        self.problems.append(f"{value.name} ({value.source}): {why}")

    # -- values ----------------------------------------------------------------------------------

    def _validate(self, section: str, model: type[M], keys: Mapping[str, Value]) -> M | None:
        """Build a model from the keys that are its own; notes sources and problems."""
        mine = {key: keys[key] for key in model.model_fields if key in keys}
        values = {key: value.value for key, value in mine.items()}
        if issubclass(model, Options):
            for key, chosen in model.choose(values, self.machine).items():
                if key not in values:
                    values[key] = chosen.value
                    self.sources[section, key] = f"chosen: {chosen.reason}"
        self.sources.update({(section, key): value.source for key, value in mine.items()})
        try:
            return model.model_validate(values)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                self.problems.append(_describe(section, model, mine, dict(item)))
            return None


def _describe(
    section: str, model: type[BaseModel], mine: Mapping[str, Value], item: dict[str, Any]
) -> str:
    location = [str(part) for part in item["loc"]]
    key = location[0] if location else section
    value = mine.get(key)
    name = ".".join([value.name if value else key, *location[1:]])
    where = f" ({value.source})" if value and value.source else ""
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"{name}{where}: unknown key{_nested_hint(model, location)}"
    if item["type"] == "missing":
        return f"{name}: required by stage {section}"
    return f"{name}{where}: {message}, got {item['input']!r}"


def _nested_hint(model: type[BaseModel], location: list[str]) -> str:
    """Nearest known name for an unknown key inside a nested section."""
    current: Any = model
    for part in location[:-1]:
        info = current.model_fields.get(part)
        current = info.annotation if info else None
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            return ""
    return nearest(location[-1], current.model_fields)
