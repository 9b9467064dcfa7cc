"""Sort the operator's keys: which belong to the top level, which to the store, which pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ucm_core.config import reference
from ucm_core.config.reading import KeyPath, RawConfig
from ucm_core.names import nearest

CONNECTOR_KEYS = ("ucm_connectors", "ucm_connector_name", "ucm_connector_config")


@dataclass(slots=True)
class Value:
    """A value as written, where it was written, and how messages name it."""

    value: Any
    source: str
    name: str


@dataclass(slots=True)
class SplitConfig:
    """``explicit``: the operator described a store, so that nothing about it may be guessed."""

    top: dict[str, Value] = field(default_factory=dict)
    store: dict[str, Value] = field(default_factory=dict)
    pipeline: Value | None = None
    explicit: bool = False


def split(raw: RawConfig, top_names: frozenset[str], problems: list[str]) -> SplitConfig:
    """Sort all keys; adds to ``problems`` what is wrong with the structure.

    The store is described by ``ucm_connectors: [{ucm_connector_name, ucm_connector_config}]``, by
    the same two keys at the top, or by the store's options directly at the top.
    """
    out = SplitConfig()
    for key, value in raw.values.items():
        if not isinstance(key, str):
            problems.append(f"{raw.source((str(key),))}: a key must be text, got {key!r}")
        elif key in CONNECTOR_KEYS:
            continue
        elif (
            key in top_names
            or key in reference.HARMLESS_TOP_KEYS
            or key in reference.REFUSED_TOP_KEYS
        ):
            out.top[key] = Value(value, raw.source((key,)), key)
        else:
            out.store[key] = Value(value, raw.source((key,)), key)
    _connectors(raw, out, top_names, problems)
    pipeline = out.store.pop("store_pipeline", None)
    if pipeline is not None:
        out.explicit = True
        if out.pipeline is not None and pipeline.value != out.pipeline.value:
            problems.append(
                f"{pipeline.name} ({pipeline.source}): {pipeline.value!r}, but {out.pipeline.name} "
                f"means '{out.pipeline.value}'; use UcmPipelineStore to choose a pipeline"
            )
        out.pipeline = out.pipeline or pipeline
    return out


def _connectors(
    raw: RawConfig, out: SplitConfig, top_names: frozenset[str], problems: list[str]
) -> None:
    values = raw.values
    if not any(key in values for key in CONNECTOR_KEYS):
        return
    out.explicit = True
    if "ucm_connectors" in values and len([k for k in CONNECTOR_KEYS if k in values]) > 1:
        problems.append("ucm_connector_name and ucm_connector_config belong inside ucm_connectors")
    for key, stray in out.store.items():
        hint = nearest(key, top_names)
        why = (
            f"unknown key{hint}"
            if hint
            else "the store's options belong under ucm_connector_config"
        )
        problems.append(f"{key} ({stray.source}): {why}")
    out.store.clear()
    path: KeyPath = ()
    connector: Any = values
    if "ucm_connectors" in values:
        listed = values["ucm_connectors"]
        if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], Mapping):
            problems.append(
                f"ucm_connectors ({raw.source(('ucm_connectors',))}): expected a list of exactly one "
                f"connector, got {listed!r}; several tiers are one pipeline: 'Cache|Posix'"
            )
            return
        path, connector = ("ucm_connectors", 0), listed[0]
        for key in connector:
            if key not in CONNECTOR_KEYS[1:]:
                hint = nearest(str(key), CONNECTOR_KEYS[1:])
                problems.append(
                    f"{_dotted((*path, key))} ({raw.source((*path, key))}): unknown key{hint}"
                )
    fixed = _connector_name(raw, connector, path, out, problems)
    _connector_options(raw, connector, path, out, top_names, fixed, problems)


def _connector_name(
    raw: RawConfig,
    connector: Mapping[str, Any],
    path: KeyPath,
    out: SplitConfig,
    problems: list[str],
) -> str | None:
    key: KeyPath = (*path, "ucm_connector_name")
    name = connector.get("ucm_connector_name")
    where = f"{_dotted(key)} ({raw.source(key)})"
    if not isinstance(name, str):
        problems.append(
            f"{where}: required, one of {', '.join(reference.CONNECTORS)}; got {name!r}"
        )
        return None
    if name in reference.REFUSED_CONNECTORS:
        problems.append(f"{where}: '{name}' is not offered: {reference.REFUSED_CONNECTORS[name]}")
        return None
    if name not in reference.CONNECTORS:
        known = ", ".join(reference.CONNECTORS)
        hint = nearest(name, reference.CONNECTORS)
        problems.append(f"{where}: unknown connector '{name}'{hint}; known: {known}")
        return None
    fixed = reference.CONNECTORS[name]
    if fixed is not None:
        out.pipeline = Value(fixed, raw.source(key), name)
    return name


def _connector_options(
    raw: RawConfig,
    connector: Mapping[str, Any],
    path: KeyPath,
    out: SplitConfig,
    top_names: frozenset[str],
    connector_name: str | None,
    problems: list[str],
) -> None:
    base: KeyPath = (*path, "ucm_connector_config")
    options = connector.get("ucm_connector_config")
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        problems.append(
            f"{_dotted(base)} ({raw.source(base)}): expected keys and values, got {options!r}"
        )
        return
    for key, value in options.items():
        source = raw.source((*base, key))
        name = str(key)
        if name in top_names or name in reference.HARMLESS_TOP_KEYS:
            problems.append(f"{name} ({source}): belongs at the top level, beside ucm_connectors")
            continue
        if connector_name == "UcmNfsStore":
            name = reference.NFS_ALIASES.get(name, name)
        if name in out.store:
            problems.append(f"{key} ({source}): means {name}, which is given as well")
            continue
        out.store[name] = Value(value, source, str(key))


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
