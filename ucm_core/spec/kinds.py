"""The words of the spec table as enums: kind, rank rule, unit."""

from __future__ import annotations

import enum
from typing import TypeVar

from ucm_core.errors import ConfigError


class Kind(str, enum.Enum):
    """How a group's data is addressed, and so how it can be reused: the one stable axis."""

    CHAIN = "chain"  # by the prefix's content, block by block
    SNAPSHOT = "snapshot"  # by exact position and prefix
    NONE = "none"  # never
    SIDECAR = "sidecar"  # follows its source group's blocks, does not vote
    FOLLOWER = "follower"  # reuses another layer's data, stores nothing


class RankRule(str, enum.Enum):
    """What the ranks of a group hold."""

    UNION = "union"  # equal content on all ranks; one has it is enough
    INTERSECTION = "intersection"  # each its own part; all must have it


class Unit(str, enum.Enum):
    """What one fetch or store moves."""

    LAYER = "layer"
    ROW = "row"  # several layers in one tensor
    WINDOW = "window"  # blocks a sliding window can still reach
    FOLLOWER = "follower"  # moves with another unit


#: Kinds that have bytes in a store.
STORED = (Kind.CHAIN, Kind.SNAPSHOT, Kind.SIDECAR)

_E = TypeVar("_E", bound=enum.Enum)


def parse(enum_type: type[_E], value: object, where: str) -> _E:
    """``value`` as a member; raises ConfigError that lists the known ones."""
    try:
        return enum_type(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in enum_type)
        raise ConfigError(
            f"{where}: unknown {enum_type.__name__.lower()} {value!r}; known are {known}"
        ) from None
