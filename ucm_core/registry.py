"""The typed specs that plugins register, and the context their factories receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from ucm_core.store.contract import Geometry

Role = Literal["worker", "scheduler", "tool"]


@dataclass(frozen=True, slots=True)
class StageContext:
    """What a stage factory may know. It never learns about tokens, layers, models or sessions.

    ``namespace_dir_name`` is the path component that holds this namespace below a root;
    ``namespace_digest`` (32 bytes) goes into object headers; ``owner`` is a label for logs.
    ``nodes``: how many hosts the engine's workers are on; media that only one host reaches are no use then.
    ``scheduler`` instances only look up, touch and prefetch: no buffers are allocated for them.
    """

    geometry: Geometry
    namespace_dir_name: str
    namespace_digest: bytes
    role: Role
    local_rank: int = 0
    local_rank_size: int = 1
    timeout_ms: int = 30_000
    owner: str = ""
    nodes: int = 1


#: Builds a native stage (``ucm_core._native.Stage``) over the one below (None for the lowest), or the
#: host memory above all stages (``ucm_core._native.HostTier``). None: the pipeline does without this
#: stage; the factory has said why.
StageFactory = Callable[[StageContext, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that a stage will allocate: once per worker process, and once per node."""

    per_rank_bytes: int = 0
    per_node_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A storage stage. ``config_model``'s fields are the options operators may set for it.

    ``host_memory`` tells from the validated options what the stage will allocate, so that
    ``ucm config`` can add it up beforehand; None: nothing worth counting. ``guarded``: the stage reaches
    a medium that can fail, so the health wrapper (``store_health``) stands before it; False for stages
    that only transform, or that find nothing by design.
    """

    name: str
    summary: str
    config_model: type[BaseModel]
    build: StageFactory
    needs_below: bool = False
    persistent: bool = False
    host_memory: Callable[[Any], HostMemory] | None = None
    guarded: bool = True


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A named stack of stages, top to bottom: ``PipelineSpec("Cache|Posix", ("Cache", "Posix"))``."""

    name: str
    stages: tuple[str, ...]
    summary: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A kind of memory that engines keep their KV in. ``name`` is what torch calls the device type.

    ``open(index)`` returns a ``ucm_core._native.Device`` for the device of that index, and raises
    ``UnsupportedError`` that says what is missing. Nothing is opened before an engine shows memory there.
    """

    name: str
    summary: str
    open: Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine adapter: which engine, which releases were tested, and how an operator turns it on."""

    name: str
    distribution: str
    tested_versions: tuple[str, ...]
    turn_on: str
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class RetentionSpec:
    """A rule that decides where checkpoints are made. ``build`` is called once per deployment and
    returns a ``ucm_core.coordinator.RetentionPolicy`` (named, not imported: storage backends use this
    module too, and know no coordinator)."""

    name: str
    summary: str
    build: Callable[[], Any]
