"""A KV cache on a device: its addresses, its device and its events reach the store, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from scripted_engine import (
    HEAD_SIZE,
    HEADS,
    ScriptedConnector,
    World,
    kv_cache_config,
    vllm_config,
)
from stub_cuda import LIBRARY, StubCuda
from ucm_core import _native
from ucm_core.errors import UnsupportedError
from ucm_core.registry import PipelineSpec, StageContext, StageSpec
from ucm_core.store import builtin
from ucm_core.store.config import StoreConfig
from ucm_core.store.contract import Geometry
from ucm_core.store.native_store import NativeBlockStore
from ucm_core.store.pipeline import open_store
from ucm_vllm.devices import HOST, KvDevice, nothing_queued
from ucm_vllm.facts import read_facts
from ucm_vllm.messages import RowBlocks, TransferOp, UcmMetadata

LAYERS, BLOCKS, ENGINE_BLOCK = 2, 16, 32


class OnCuda:
    """A host tensor that says it lies on a GPU; the stub driver's device memory is host memory."""

    def __init__(self, tensor: torch.Tensor, device: str = "cuda:0") -> None:
        self._tensor = tensor
        self.device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class DeviceWorld(World):
    """Real stores over one in-process medium, on the device that the adapter names."""

    event_sync = True

    def open_store(self, geometry: Geometry, manifest: Any, device: KvDevice = HOST) -> Any:
        stages: dict[str, StageSpec] = {}
        pipelines: dict[str, PipelineSpec] = {}
        builtin.ucm_register_stages(lambda spec: stages.update({spec.name: spec}))
        builtin.ucm_register_pipelines(lambda spec: pipelines.update({spec.name: spec}))
        native = _native.host_device()
        if device.kind == "cuda":
            native = _native.cuda_device(device.index, library=str(LIBRARY))
        store: NativeBlockStore = open_store(
            "Fake",
            stages=stages,
            pipelines=pipelines,
            stage_configs={"Fake": builtin.FakeConfig(fake_medium=str(self.folder))},
            store_config=StoreConfig(staging_buffer_gb=8 << 20),
            context=StageContext(geometry, "ns", manifest.digest, "worker"),
            device=native,
            event_sync=self.event_sync,
        )
        return store


@pytest.fixture
def cuda() -> Iterator[StubCuda]:
    assert LIBRARY.exists(), f"{LIBRARY} is missing: run `make native`"
    stub = StubCuda()
    yield stub
    stub.close()
    assert stub.live("registered") == 0
    assert stub.live("contexts") == 0


class Rig:
    """A worker's connector over pages 'on the GPU', driven by hand-made operations."""

    def __init__(self, folder: Path, *, event_sync: bool = True) -> None:
        world = DeviceWorld(folder)
        world.event_sync = event_sync
        world.settings["event_sync"] = event_sync
        world.use()
        config = vllm_config(world)
        kv = kv_cache_config(config, BLOCKS)
        self.worker = ScriptedConnector(config, KVConnectorRole.WORKER, kv)
        self.memory = torch.full((LAYERS, BLOCKS, HEADS, ENGINE_BLOCK, 2 * HEAD_SIZE), 1.0)
        names = kv.kv_cache_groups[0].layer_names
        pages: Any = {name: OnCuda(self.memory[i]) for i, name in enumerate(names)}
        self.worker.register_kv_caches(pages)

    def step(self, meta: UcmMetadata) -> None:
        """One engine step: loads start before it, saves after it; waits until both have ended."""
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)  # type: ignore[arg-type]
        self.worker.wait_for_save()
        until = time.monotonic() + 20
        while any(self.worker.pending()[what] for what in ("loads", "saves")):
            assert time.monotonic() < until
            self.worker.get_finished(set())
            time.sleep(0.001)
        news = self.worker.build_connector_worker_meta()
        assert not (news and (getattr(news, "failed", None) or getattr(news, "bad", None)))

    def remark(self) -> None:
        """Take up a mark that was patched in after the pages were registered."""
        device = self.worker._deployment.device
        self.worker._work.loads._mark = device.mark(event_sync=True)

    def save(self) -> None:
        """Pages 1 and 2."""
        self.step(UcmMetadata(saves=[_operation(1, [1, 2])]))

    def load(self) -> None:
        """Into pages 4 and 5."""
        self.step(UcmMetadata(loads=[_operation(2, [4, 5])]))

    def save_then_load(self, cuda: StubCuda) -> torch.Tensor:
        """All pages are written late by the engine and saved; pages 4 and 5 as they were loaded."""
        cuda.fill(self.memory.data_ptr(), self.memory.nbytes, 0x40)
        self.save()
        time.sleep(0.5)  # whatever the engine queued is over
        self.memory[:, 4:6] = -1.0
        self.load()
        self.worker.shutdown()
        return self.memory[:, 4:6]


def _operation(op_id: int, pages: list[int]) -> TransferOp:
    links, blocks = np.full((1, 32), 9, np.uint8), np.zeros(1, np.int64)
    row = RowBlocks(0, links, blocks, np.array([[pages]], np.int32))
    return TransferOp(op_id, "r", (row,), 0, len(pages) * ENGINE_BLOCK)


WRITTEN = torch.frombuffer(bytearray([0x40] * 4), dtype=torch.float32)


def test_a_save_waits_for_the_kernels_queued_before_it(
    tmp_path: Path, cuda: StubCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvDevice, "_mark_cuda", lambda _self: cuda.mark())
    assert (Rig(tmp_path).save_then_load(cuda) == WRITTEN).all()


def test_negative_control_without_the_event_old_bytes_are_saved(
    tmp_path: Path, cuda: StubCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvDevice, "_mark_cuda", lambda _self: nothing_queued())
    assert (Rig(tmp_path).save_then_load(cuda) == 1.0).all()


@pytest.mark.parametrize("marked", [True, False])
def test_a_load_waits_for_kernels_that_may_still_use_its_pages(
    tmp_path: Path, cuda: StubCuda, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    """With several steps in flight one of them may write into pages that were given away since."""
    monkeypatch.setattr(KvDevice, "_mark_cuda", lambda _self: nothing_queued())
    rig = Rig(tmp_path)
    rig.save()
    if marked:
        monkeypatch.setattr(KvDevice, "_mark_cuda", lambda _self: cuda.mark())
        rig.remark()
    cuda.fill(rig.memory.data_ptr(), rig.memory.nbytes, 0x40)
    rig.load()
    time.sleep(0.5)
    rig.worker.shutdown()
    kept = bool((rig.memory[:, 4:6] == 1.0).all())
    assert kept is marked, "without the event the loaded bytes are overwritten: the control"


def test_without_event_sync_the_whole_device_is_waited_for(
    tmp_path: Path, cuda: StubCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_self: KvDevice) -> Any:
        raise AssertionError("no event is recorded")

    monkeypatch.setattr(KvDevice, "_mark_cuda", never)
    assert (Rig(tmp_path, event_sync=False).save_then_load(cuda) == WRITTEN).all()


def test_pages_on_two_devices_or_on_an_unknown_one_are_refused() -> None:
    page = torch.zeros(1)
    with pytest.raises(UnsupportedError, match="found cuda:0, cuda:1"):
        KvDevice.of([OnCuda(page), OnCuda(page, "cuda:1")])  # type: ignore[list-item]
    with pytest.raises(UnsupportedError, match="served are cpu, cuda"):
        KvDevice.of([OnCuda(page, "xpu:0")])  # type: ignore[list-item]
    assert KvDevice.of([page]) == HOST


def test_pages_of_a_gpu_are_shared_only_with_equal_deployments(tmp_path: Path) -> None:
    config = vllm_config(World(tmp_path))
    kv = kv_cache_config(config, BLOCKS)
    config.device_config.device_type = "cuda"
    assert read_facts(config, kv).kinds[0].packing == "cuda_attn"
