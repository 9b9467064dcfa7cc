"""Find the plugins that are installed, without importing any of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions

from ucm_core.hookspecs import ENTRY_POINT_GROUP
from ucm_core.plugins.report import describe_error


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry point of the group, or a distribution whose metadata could not be read.

    ``problem`` is empty for a readable one. ``location`` is the folder the distribution lies in.
    """

    name: str
    value: str
    distribution: str
    version: str
    location: str
    entry_point: EntryPoint | None = None
    problem: str = ""

    @property
    def sort_key(self) -> tuple[str, str]:
        """Loading order: by name, then by distribution, the same in every process."""
        return (self.name, self.distribution)


@dataclass(slots=True)
class _Seen:
    distributions: set[str] = field(default_factory=set)


def discover(installed: Iterable[Distribution] | None = None) -> list[Candidate]:
    """All candidates in loading order.

    Distributions are read one at a time: a foreign package with unreadable metadata becomes a
    candidate with a ``problem`` instead of hiding every plugin. When a distribution lies on the path
    twice, the first counts, as it does for imports.
    """
    found: list[Candidate] = []
    seen = _Seen()
    for dist in distributions() if installed is None else installed:
        found.extend(_candidates(dist, seen))
    return sorted(found, key=lambda candidate: candidate.sort_key)


def _candidates(dist: Distribution, seen: _Seen) -> list[Candidate]:
    location = _location(dist)
    try:
        points = [p for p in dist.entry_points if p.group == ENTRY_POINT_GROUP]
    except Exception as error:
        if not _mentions_group(dist):
            return []  # broken, but none of our business
        reason = f"its entry points cannot be read: {describe_error(error)}"
        return [Candidate("?", "", _name(dist), "", location, problem=reason)]
    if not points:
        return []
    name = _name(dist)
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key and key in seen.distributions:
        return []
    seen.distributions.add(key)
    version = _version(dist)
    return [Candidate(p.name, p.value, name, version, location, p) for p in points]


def _mentions_group(dist: Distribution) -> bool:
    try:
        text = dist.read_text("entry_points.txt") or ""
    except Exception:
        # Unreadable bytes: it might be a plugin; saying so is better than hiding it.
        return True
    return f"[{ENTRY_POINT_GROUP}]" in text


def _name(dist: Distribution) -> str:
    try:
        return str(dist.metadata["Name"] or "")
    except Exception:
        return ""


def _version(dist: Distribution) -> str:
    try:
        return str(dist.metadata["Version"] or "")
    except Exception:
        return ""


def _location(dist: Distribution) -> str:
    try:
        return str(dist.locate_file(""))
    except Exception:
        return ""
