"""Lets vLLM's OffloadingConnector run where the "device" is the CPU, as a peer to measure beside.

Only its copy engine is replaced (upstream binds it to CUDA streams): plain tensor copies, with runs
of neighbouring pages moved by one call, so that the peer is not slowed by Python. Scheduler side,
manager, shared region and file tier are vLLM's own. Named in ``kv_connector_extra_config``:
``{"spec_name": "CpuCopySpec", "spec_module_path": "benchmarks.support.cpu_offload", ...}``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Indices = npt.NDArray[np.int32]


def runs(device: Indices, host: Indices) -> Iterator[tuple[int, int, int]]:
    """(device page, host page, count) of the runs that are consecutive on both sides."""
    breaks = np.flatnonzero((np.diff(device) != 1) | (np.diff(host) != 1)) + 1
    edges = [0, *breaks.tolist(), len(device)]
    for begin, end in itertools.pairwise(edges):
        if end > begin:
            yield int(device[begin]), int(host[begin]), end - begin


class CpuCopyWorker(OffloadingWorker):
    """Copies at submission; a job is finished when the next ``get_finished`` asks."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, chunks: int, region: SharedOffloadRegion | None
    ) -> None:
        self._region = region
        self._device: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            self._device.append(cache.tensor.view(torch.int8).view(-1, page))
            self._host.append(
                torch.zeros((chunks, page), dtype=torch.int8)
                if region is None
                else region.create_next_worker_view(page)
            )
        self._refs = kv_caches.group_data_refs
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: Any, *, store: bool) -> bool:
        started, moved, at = time.monotonic(), 0, 0
        for group, count in enumerate(device.group_sizes):
            pages = device.block_ids[at : at + count], host.block_ids[at : at + count]
            at += count
            for ref in self._refs[group] if count else ():
                ours, theirs = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                for d, h, n in runs(*pages):
                    if store:
                        theirs[h : h + n].copy_(ours[d : d + n])
                    else:
                        ours[d : d + n].copy_(theirs[h : h + n])
                moved += count * ref.page_size_bytes
        elapsed = max(time.monotonic() - started, 1e-9)
        self._finished.append(TransferResult(job_id, True, moved, elapsed))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies are complete when submitted."""

    def shutdown(self) -> None:
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class CpuCopySpec(CPUOffloadingSpec):
    """Host tier alone."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = CpuCopyWorker(kv_caches, self.num_chunks, None)
        return self._worker


class CpuCopyTieringSpec(TieringOffloadingSpec):
    """Host tier over vLLM's secondary tiers (files)."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopyWorker(kv_caches, self.num_chunks, region)
        return self._worker
