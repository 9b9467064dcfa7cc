"""A store over files for tests: opened through the registered specs, as an engine adapter does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_backend_posix import plugin
from ucm_backend_posix.cache import CacheConfig
from ucm_backend_posix.compress import CompressConfig
from ucm_backend_posix.config import PosixConfig
from ucm_core.registry import PipelineSpec, Role, StageContext, StageSpec
from ucm_core.store.config import HealthConfig, StoreConfig
from ucm_core.store.contract import Geometry, RunShape, Status
from ucm_core.store.native_store import NativeBlockStore
from ucm_core.store.pipeline import open_store

NAMESPACE = "ns-test"


def geometry(shards: int = 4, shard_bytes: int = 8192, layout: str = "test-layout") -> Geometry:
    return Geometry(shards, shard_bytes, 1, RunShape(shard_bytes), layout)


def specs() -> tuple[dict[str, StageSpec], dict[str, PipelineSpec]]:
    stages: dict[str, StageSpec] = {}
    pipelines: dict[str, PipelineSpec] = {}
    plugin.ucm_register_stages(lambda spec: stages.__setitem__(spec.name, spec))
    plugin.ucm_register_pipelines(lambda spec: pipelines.__setitem__(spec.name, spec))
    return stages, pipelines


def ids_of(numbers: Iterable[int]) -> npt.NDArray[np.uint8]:
    """``uint8[N, 16]``: the same ids for the same numbers in every process."""
    rows = [np.random.default_rng(n + 1).integers(0, 256, 16, dtype=np.uint8) for n in numbers]
    return np.stack(rows)


def content(shape: Geometry, number: int) -> npt.NDArray[np.uint8]:
    """``uint8[shards, shard_bytes]`` that only this number has."""
    rng = np.random.default_rng(1_000_003 * number + 17)
    return rng.integers(0, 256, (shape.shard_count, shape.shard_bytes), dtype=np.uint8)


def object_path(root: Path, number: int) -> Path:
    name = ids_of([number])[0].tobytes().hex()
    return root / NAMESPACE / name[:2] / name


@dataclass
class PosixStore:
    """Dump and load objects by number; bytes are checked whenever a load says OK."""

    roots: list[Path]
    shape: Geometry = field(default_factory=geometry)
    role: Role = "worker"
    digest: bytes = b"\x07" * 32
    options: dict[str, Any] = field(default_factory=dict)
    timeout_ms: int = 30_000
    #: Options of a host cache above; None: pipeline `Posix`.
    cache: dict[str, Any] | None = None
    #: Options of compression above the files; None: without.
    compress: dict[str, Any] | None = None
    rank: int = 0
    ranks: int = 1
    health: HealthConfig = field(default_factory=HealthConfig)

    def __post_init__(self) -> None:
        stages, pipelines = specs()
        config = PosixConfig(
            storage_backends=":".join(str(root) for root in self.roots), **self.options
        )
        configs: dict[str, Any] = {"Posix": config}
        names = ["Posix"]
        if self.compress is not None:
            configs["Compress"] = CompressConfig(**self.compress)
            names.insert(0, "Compress")
        if self.cache is not None:
            configs["Cache"] = CacheConfig(**self.cache)
            names.insert(0, "Cache")
        self.store: NativeBlockStore = open_store(
            "|".join(names),
            stages=stages,
            pipelines=pipelines,
            stage_configs=configs,
            store_config=StoreConfig(
                staging_buffer_gb="32 MiB",
                timeout_ms=self.timeout_ms,
                dump_retries=0,
                store_health=self.health,
            ),
            context=StageContext(
                self.shape, NAMESPACE, self.digest, self.role, self.rank, self.ranks
            ),
        )

    def _rows(
        self, numbers: list[int], memory: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        count = self.shape.shard_count
        ids = np.repeat(ids_of(numbers), count, axis=0)
        shards = np.tile(np.arange(count, dtype=np.uint32), len(numbers))
        first = memory.ctypes.data
        addresses = first + np.arange(len(shards), dtype=np.uint64) * self.shape.shard_bytes
        return ids, shards, addresses.astype(np.uint64).reshape(-1, 1)

    def dump(self, numbers: Iterable[int]) -> list[Status]:
        """Durable result of each object."""
        wanted = list(numbers)
        memory = np.concatenate([content(self.shape, n) for n in wanted])
        task = self.store.dump(*self._rows(wanted, memory))
        return self._per_object(task.wait_durable())

    def dump_bytes(self, number: int, memory: npt.NDArray[np.uint8]) -> Status:
        """Durable result of one object of these bytes, ``uint8[shards, shard_bytes]``."""
        return self._per_object(self.store.dump(*self._rows([number], memory)).wait_durable())[0]

    def load(self, numbers: Iterable[int]) -> list[Status]:
        statuses, memory = self.load_bytes(numbers)
        for i, (number, status) in enumerate(zip(numbers, statuses, strict=True)):
            if status == Status.OK:
                assert np.array_equal(memory[i], content(self.shape, number)), "wrong bytes"
        return statuses

    def load_bytes(self, numbers: Iterable[int]) -> tuple[list[Status], npt.NDArray[np.uint8]]:
        wanted = list(numbers)
        memory = np.zeros(
            (len(wanted), self.shape.shard_count, self.shape.shard_bytes), dtype=np.uint8
        )
        task = self.store.load(*self._rows(wanted, memory))
        return self._per_object(task.wait()), memory

    def present(self, numbers: Iterable[int]) -> list[bool]:
        return [bool(x) for x in self.store.lookup(ids_of(numbers))]

    def stat(self, name: str) -> int:
        return self.store.stats()[f"Posix.{name}"]

    def cached(self, name: str) -> int:
        return self.store.stats()[f"cache.{name}"]

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> PosixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _per_object(self, rows: npt.NDArray[np.uint8]) -> list[Status]:
        grouped = rows.reshape(-1, self.shape.shard_count)
        return [Status(int(max(row))) for row in grouped]
