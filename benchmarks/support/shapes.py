"""Shapes of engine caches: where the pages of a stored block lie in an engine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A layer-major cache as vLLM lays it out: page ``b`` of layer ``l`` starts at
    ``l * engine_blocks * page_bytes + b * page_bytes``. A stored block gathers
    ``runs`` engine blocks of every layer; a shard is one layer's share."""

    name: str
    note: str
    layers: int
    page_bytes: int
    runs: int
    objects: int

    @property
    def engine_blocks(self) -> int:
        """A cache twice as large as the data, so that the pages in use are scattered."""
        return 2 * self.objects * self.runs

    @property
    def layer_stride(self) -> int:
        return self.engine_blocks * self.page_bytes

    @property
    def engine_bytes(self) -> int:
        return self.layers * self.layer_stride

    @property
    def shard_bytes(self) -> int:
        return self.runs * self.page_bytes

    @property
    def object_bytes(self) -> int:
        return self.layers * self.shard_bytes

    @property
    def total_bytes(self) -> int:
        return self.objects * self.object_bytes

    def order(self) -> npt.NDArray[np.uint32]:
        """``uint32[objects, runs]``: the engine block of every run, scattered as in a cache that
        has been in use. The same in every process."""
        blocks = np.random.default_rng(20).permutation(self.engine_blocks)
        used = blocks[: self.objects * self.runs]
        return used.astype(np.uint32).reshape(self.objects, self.runs)

    def addresses(self, base: int) -> npt.NDArray[np.uint64]:
        """``uint64[objects * layers, runs]``: rows object by object, layers ascending."""
        blocks = self.order().astype(np.uint64)[:, None, :] * np.uint64(self.page_bytes)
        layers = np.arange(self.layers, dtype=np.uint64)[None, :, None]
        table = np.uint64(base) + layers * np.uint64(self.layer_stride) + blocks
        return np.ascontiguousarray(table.reshape(-1, self.runs))

    def limit_arguments(self, directory: Path) -> dict[str, object]:
        """The same cache for ``ucm_limits copy``; writes the block order below ``directory``."""
        path = directory / f"{self.name}.order"
        path.write_bytes(self.order().tobytes())
        return {
            "name": self.name,
            "objects": self.objects,
            "shards": self.layers,
            "runs": self.runs,
            "run_bytes": self.page_bytes,
            "engine_bytes": self.engine_bytes,
            "layer_stride": self.layer_stride,
            "block_stride": self.page_bytes,
            "order": path,
        }


KIB = 1024

SHAPES: tuple[CacheShape, ...] = (
    CacheShape(
        "llama-80m",
        "12 layers, 4 KV heads x 64, bf16, vLLM block 32: 768 KiB objects of 24 x 32 KiB",
        layers=12,
        page_bytes=32 * KIB,
        runs=2,
        objects=192,
    ),
    CacheShape(
        "llama-8b",
        "32 layers, 8 KV heads x 128, bf16, vLLM block 16: 8 MiB objects of 128 x 64 KiB",
        layers=32,
        page_bytes=64 * KIB,
        runs=4,
        objects=24,
    ),
    CacheShape(
        "contiguous",
        "one page a block: 1 MiB objects of one piece",
        layers=1,
        page_bytes=1024 * KIB,
        runs=1,
        objects=192,
    ),
)
