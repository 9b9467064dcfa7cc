"""Opens a store the way an operator would configure it, with its own namespace and no engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.support.shapes import CacheShape
from ucm_core.config.load import load_config
from ucm_core.plugins import PluginHost
from ucm_core.registry import Role, StageContext
from ucm_core.store.contract import Geometry, RunShape
from ucm_core.store.native_store import NativeBlockStore
from ucm_core.store.pipeline import open_store


def geometry(shape: CacheShape) -> Geometry:
    """Objects of ``shape``: a shard per layer, a run per engine block."""
    return Geometry(
        shard_count=shape.layers,
        shard_bytes=shape.shard_bytes,
        runs_per_shard=shape.runs,
        run=RunShape(shape.page_bytes),
        layout=f"benchmarks/{shape.name}",
    )


def open_pipeline(
    pipeline: str, shape: CacheShape, directory: Path, role: Role = "worker", **options: object
) -> NativeBlockStore:
    """A store over ``directory``; ``options`` are the operator's keys. The caller closes it."""
    host = PluginHost().load()
    given = {"store_pipeline": pipeline, **options}
    if "Posix" in pipeline:
        given["storage_backends"] = str(directory)
    entry = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": given}
    config = load_config({"ucm_connectors": [entry]}, host=host)
    context = StageContext(
        geometry=geometry(shape),
        namespace_dir_name=f"bench-{shape.name}",
        namespace_digest=hashlib.sha256(f"{directory} {shape.name}".encode()).digest(),
        role=role,
        owner="benchmarks",
    )
    return open_store(
        config.pipeline.name,
        stages=host.stages,
        pipelines=host.pipelines,
        stage_configs=config.stages,
        store_config=config.store,
        context=context,
    )


class Workload:
    """The engine's side of a shape: its cache memory and the rows of one task over all objects.

    Owns the memory; keep it alive while a task runs.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        memory = np.empty(shape.engine_bytes + 4096, np.uint8)
        offset = -memory.ctypes.data % 4096
        self.memory: npt.NDArray[np.uint8] = memory[offset : offset + shape.engine_bytes]
        pages = np.arange(shape.engine_bytes // 4096, dtype=np.uint32) % 251
        self.memory[:] = np.repeat(pages.astype(np.uint8), 4096)
        self.addresses = shape.addresses(self.memory.ctypes.data)
        self.shards = np.tile(np.arange(shape.layers, dtype=np.uint32), shape.objects)

    def ids(self, batch: int) -> npt.NDArray[np.uint8]:
        """``uint8[objects, 16]``: ids of a batch; the same in every process."""
        return random_ids(self.shape.objects, f"{self.shape.name} {batch}")

    def rows(self, ids: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """``uint8[objects * layers, 16]``: one row per shard."""
        return np.repeat(ids, self.shape.layers, axis=0)


def random_ids(count: int, seed: str) -> npt.NDArray[np.uint8]:
    """``uint8[count, 16]``, uniformly distributed as real object ids are."""
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    return np.random.default_rng(start).integers(0, 256, (count, 16), dtype=np.uint8)
