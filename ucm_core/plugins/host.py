"""The plugin host: one object per process that wants plugins, never a global."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ucm_core.errors import PluginConflictError, PluginError, PluginVersionError
from ucm_core.names import nearest
from ucm_core.plugins.discover import Candidate, discover
from ucm_core.plugins.loading import (
    KINDS,
    Attempt,
    LoadedPlugin,
    guarded,
    load_plugin,
    spec_names,
)
from ucm_core.plugins.report import PluginReport, PluginStatus, describe_owner
from ucm_core.registry import DeviceSpec, EngineSpec, PipelineSpec, RetentionSpec, StageSpec

if TYPE_CHECKING:
    import click

_log = logging.getLogger("ucm.plugins")


class PluginHost:
    """Loads plugins one at a time, in name order, all-or-nothing each.

    A plugin that cannot be used becomes a report and never stops the others; asking for a name that
    only it would offer raises, with its reason. Loading is idempotent and thread-safe. ``env`` is
    read for ``UCM_DISABLED_PLUGINS`` (names, comma-separated) and ``UCM_TRACE_PLUGINS`` (1: say every
    step on stderr). Nothing is imported before :meth:`load`.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        candidates: Iterable[Candidate] | None = None,
    ) -> None:
        self._env = os.environ if env is None else env
        self._candidates = None if candidates is None else list(candidates)
        self._lock = threading.RLock()
        self._loaded = False
        self._reset()

    def _reset(self) -> None:
        self._plugins: list[LoadedPlugin] = []
        self._started: list[LoadedPlugin] = []
        self._reports: list[PluginReport] = []
        self._tables: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self._owners: dict[tuple[str, str], str] = {}

    # -- loading ---------------------------------------------------------------------------------

    def load(self) -> PluginHost:
        """Load every installed plugin once; later calls do nothing. Returns the host."""
        with self._lock:
            if self._loaded:
                return self
            self._reset()  # an earlier load may have been interrupted half-way
            candidates = discover() if self._candidates is None else self._candidates
            disabled = self._disabled_names()
            for name in sorted(disabled - {candidate.name for candidate in candidates}):
                known = [candidate.name for candidate in candidates]
                _log.warning(
                    "UCM_DISABLED_PLUGINS names '%s', which is not installed%s",
                    name,
                    nearest(name, known),
                )
            for candidate in sorted(candidates, key=lambda c: c.sort_key):
                if candidate.name in disabled:
                    reason = "named in UCM_DISABLED_PLUGINS"
                    self._report(candidate, PluginStatus.DISABLED, reason)
                else:
                    self._load_one(candidate)
            self._loaded = True
            return self

    def _disabled_names(self) -> set[str]:
        text = self._env.get("UCM_DISABLED_PLUGINS", "")
        return {name.strip() for name in text.split(",") if name.strip()}

    def _load_one(self, candidate: Candidate) -> None:
        attempt = Attempt()
        began = time.perf_counter()
        try:
            self._refuse_second_of_name(candidate)
            plugin = load_plugin(candidate, attempt, self._trace)
            self._adopt(plugin)
        except PluginVersionError as error:
            self._report(candidate, PluginStatus.INCOMPATIBLE, str(error), attempt.provided)
        except PluginError as error:
            self._report(candidate, PluginStatus.BROKEN, str(error), attempt.provided)
        else:
            self._report(candidate, PluginStatus.LOADED, "", attempt.provided)
        self._trace(f"{candidate.name}: done in {(time.perf_counter() - began) * 1e3:.1f} ms")

    def _refuse_second_of_name(self, candidate: Candidate) -> None:
        for report in self._reports:
            if report.name == candidate.name and not candidate.problem:
                second = _owner(candidate)
                raise PluginConflictError(
                    f"two distributions name a plugin '{candidate.name}': {report.owner} came first, "
                    f"{second} is left out; uninstall one of them"
                )

    def _adopt(self, plugin: LoadedPlugin) -> None:
        """Take over all specs of a plugin, or none when one name is taken."""
        owner = _owner(plugin.candidate)
        fresh: dict[tuple[str, str], Any] = {}
        for kind, specs in plugin.specs.items():
            for spec in specs:
                for name in spec_names(spec):
                    holder = owner if (kind, name) in fresh else self._owners.get((kind, name))
                    if holder is not None:
                        raise PluginConflictError(
                            f"{kind} '{name}' is registered by {holder} and again by {owner}; "
                            "disable one with UCM_DISABLED_PLUGINS or uninstall it"
                        )
                    fresh[kind, name] = spec
        for (kind, name), spec in fresh.items():
            self._owners[kind, name] = owner
            self._tables[kind][name] = spec
        self._plugins.append(plugin)

    def _report(
        self,
        candidate: Candidate,
        status: PluginStatus,
        reason: str,
        provided: Iterable[tuple[str, str]] = (),
    ) -> None:
        report = PluginReport(
            name=candidate.name,
            status=status,
            reason=reason,
            distribution=candidate.distribution,
            version=candidate.version,
            module=candidate.value,
            location=candidate.location,
            provides=tuple(provided),
        )
        self._reports.append(report)
        self._trace(f"{candidate.name}: {status.value} {reason}")
        if status in (PluginStatus.BROKEN, PluginStatus.INCOMPATIBLE):
            _log.warning("%s is %s and left out: %s", report.owner, status.value, reason)

    def _trace(self, line: str) -> None:
        if self._env.get("UCM_TRACE_PLUGINS", "") not in ("", "0"):
            print(f"[ucm plugins] {line}", file=sys.stderr, flush=True)

    # -- what was registered ---------------------------------------------------------------------

    @property
    def reports(self) -> tuple[PluginReport, ...]:
        """One report per plugin, in loading order."""
        self.load()
        return tuple(self._reports)

    @property
    def stages(self) -> Mapping[str, StageSpec]:
        """Stage name -> spec, read-only."""
        return self._table("stage")

    @property
    def pipelines(self) -> Mapping[str, PipelineSpec]:
        """Pipeline name or alias -> spec, read-only."""
        return self._table("pipeline")

    @property
    def engines(self) -> Mapping[str, EngineSpec]:
        """Engine name -> spec, read-only."""
        return self._table("engine")

    @property
    def retentions(self) -> Mapping[str, RetentionSpec]:
        """Name of a retention rule -> spec, read-only."""
        return self._table("retention")

    def retention(self, name: str = "default") -> RetentionSpec:
        """The retention rule; raises ``PluginError`` as :meth:`pipeline` does."""
        spec = self.retentions.get(name)
        if spec is None:
            raise PluginError(self._explain("retention", name))
        return spec

    @property
    def devices(self) -> Mapping[str, DeviceSpec]:
        """Device type -> spec, read-only."""
        return self._table("device")

    def owner(self, kind: str, name: str) -> str:
        """Who registered ``name``: ``plugin 'posix' (ucm-backend-posix 0.1.0)``."""
        self.load()
        return self._owners[kind, name]

    def pipeline(self, name: str) -> PipelineSpec:
        """The pipeline, with all of its stages known; raises ``PluginError`` that says what is known,
        what was probably meant, and why a plugin that offers it is not loaded."""
        spec = self.pipelines.get(name)
        if spec is None:
            raise PluginError(self._explain("pipeline", name))
        for stage in spec.stages:
            if stage not in self.stages:
                raise PluginError(f"pipeline '{name}': {self._explain('stage', stage)}")
        return spec

    def stage(self, name: str) -> StageSpec:
        """The stage; raises ``PluginError`` as :meth:`pipeline` does."""
        spec = self.stages.get(name)
        if spec is None:
            raise PluginError(self._explain("stage", name))
        return spec

    def device(self, name: str) -> DeviceSpec:
        """The device type; raises ``PluginError`` as :meth:`pipeline` does."""
        spec = self.devices.get(name)
        if spec is None:
            raise PluginError(self._explain("device", name))
        return spec

    def _table(self, kind: str) -> Mapping[str, Any]:
        self.load()
        return MappingProxyType(self._tables[kind])

    def _explain(self, kind: str, name: str) -> str:
        known = sorted(self._tables[kind])
        text = f"unknown {kind} '{name}'{nearest(name, known)}; known: {', '.join(known) or 'none'}"
        missing = [r for r in self._reports if r.status is not PluginStatus.LOADED]
        by_name = [r for r in missing if (kind, name) in r.provides]
        for report in by_name or missing:
            text += f"; {report.owner} is {report.status.value}: {report.reason}"
        return text

    # -- hooks after loading ---------------------------------------------------------------------

    def startup(self, context: Mapping[str, str]) -> None:
        """Call ``ucm_startup`` of each plugin once. A plugin that raises loses what it registered."""
        with self._lock:
            self.load()
            for plugin in [p for p in self._plugins if p not in self._started]:
                try:
                    self._call(plugin, "ucm_startup", context=context)
                except PluginError as error:
                    self._withdraw(plugin, str(error))
                else:
                    self._started.append(plugin)

    def close(self) -> None:
        """Call ``ucm_shutdown`` of the plugins that were started, newest first. Idempotent."""
        with self._lock:
            while self._started:
                self._call_logged(self._started.pop(), "ucm_shutdown")

    def add_commands(self, cli: click.Group) -> None:
        """Let each plugin add its subcommands; one that raises is logged and left out."""
        self.load()
        for plugin in self._plugins:
            self._call_logged(plugin, "ucm_register_commands", cli=cli)

    def header_lines(self, context: Mapping[str, str]) -> list[str]:
        """Lines of ``ucm_report_header`` of every plugin, in loading order."""
        self.load()
        lines: list[str] = []
        for plugin in self._plugins:
            for answer in self._call_logged(plugin, "ucm_report_header", context=context):
                lines.extend([answer] if isinstance(answer, str) else map(str, answer))
        return lines

    def _call(self, plugin: LoadedPlugin, hook: str, **arguments: Any) -> list[Any]:
        """The plugin's answers, [] when it does not implement the hook; raises ``PluginError``."""
        if hook not in plugin.implemented:
            return []
        self._trace(f"{plugin.candidate.name}: calling {hook}")
        call = functools.partial(getattr(plugin.hooks, hook), **arguments)
        return list(guarded(f"{hook} failed", call))

    def _call_logged(self, plugin: LoadedPlugin, hook: str, **arguments: Any) -> list[Any]:
        try:
            return self._call(plugin, hook, **arguments)
        except PluginError as error:
            _log.error("%s: %s", _owner(plugin.candidate), error)
            return []

    def _withdraw(self, plugin: LoadedPlugin, reason: str) -> None:
        owner = _owner(plugin.candidate)
        self._plugins.remove(plugin)
        for kind, name in [key for key, holder in self._owners.items() if holder == owner]:
            del self._owners[kind, name]
            del self._tables[kind][name]
        loaded = PluginStatus.LOADED
        place = next(
            i for i, r in enumerate(self._reports) if r.owner == owner and r.status is loaded
        )
        provides = self._reports.pop(place).provides
        self._report(plugin.candidate, PluginStatus.BROKEN, reason, provides)
        self._reports.insert(place, self._reports.pop())


def _owner(candidate: Candidate) -> str:
    return describe_owner(candidate.name, candidate.distribution, candidate.version)
