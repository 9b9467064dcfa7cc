"""``ucm check``: does a block that is stored come back, where a server would keep it?"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from ucm_core.cli.config import extra_keys
from ucm_core.config.load import load_config
from ucm_core.config.model import UcmConfig
from ucm_core.config.units import format_size
from ucm_core.errors import StoreError
from ucm_core.identity import Manifest
from ucm_core.plugins import PluginHost
from ucm_core.registry import PipelineSpec, StageContext
from ucm_core.store.contract import BlockStore, Geometry, RunShape, Status
from ucm_core.store.native_store import NativeBlockStore
from ucm_core.store.pipeline import open_store

SHARDS, SHARD_BYTES = 4, 1 << 18
#: Buffers of the check, whatever a server would take.
BUFFER_BYTES = 8 << 20

Bytes = npt.NDArray[np.uint8]


@click.command("check")
@click.option("--file", "file", type=click.Path(), help="A YAML file instead of UCM_CONFIG_FILE.")
@click.option("--inline", metavar="JSON", help="Keys as in vLLM's kv_connector_extra_config.")
@click.pass_obj
def check_command(host: PluginHost, file: str | None, inline: str | None) -> None:
    """Store a block where a server would, load it again and compare; exits 1 when it is not the same."""
    config = load_config(extra_keys(file, inline), host=host.load())
    stage = config.pipeline.stages[-1]
    roots = [Path(root) for root in getattr(config.stages.get(stage), "storage_backends", ())]
    where = f"stage {stage}" + (f" in {', '.join(map(str, roots))}" if roots else "")
    manifest = Manifest(f"check-{secrets.token_hex(8)}", 64, 1)
    try:
        said = _check(host, config, stage, manifest)
    finally:
        for root in roots:
            shutil.rmtree(root / manifest.directory_name, ignore_errors=True)
    click.echo(f"{where}: {said}")


def _check(host: PluginHost, config: UcmConfig, stage: str, manifest: Manifest) -> str:
    """What to tell; raises StoreError where the block does not come back."""
    block = np.frombuffer(secrets.token_bytes(16), np.uint8).reshape(1, 16).copy()
    data = np.frombuffer(secrets.token_bytes(SHARDS * SHARD_BYTES), np.uint8).copy()
    started = time.monotonic()
    with _opened(host, config, stage, manifest) as store:
        _expect("store", stage, *_dump(store, block, data))
    stored = time.monotonic()
    back = np.zeros_like(data)
    with _opened(host, config, stage, manifest) as store:
        if not store.lookup(block).all():
            raise StoreError(
                f"stage {stage} took a block and does not have it: nothing will be reused. Set "
                "store_pipeline to one that keeps blocks"
            )
        _expect("load", stage, *_load(store, block, back))
        store.remove(block)
    if not np.array_equal(back, data):
        raise StoreError(f"stage {stage} gave back other bytes than it was given: do not use it")
    times = f"stored in {stored - started:.3f} s, loaded in {time.monotonic() - stored:.3f} s"
    return f"a block of {format_size(data.nbytes)} came back as it was ({times})"


def _opened(
    host: PluginHost, config: UcmConfig, stage: str, manifest: Manifest
) -> NativeBlockStore:
    """The lowest stage alone, which is what persists, with small buffers and no health wrapper."""
    context = StageContext(
        geometry=Geometry(SHARDS, SHARD_BYTES, 1, RunShape(SHARD_BYTES), "check"),
        namespace_dir_name=manifest.directory_name,
        namespace_digest=manifest.digest,
        role="tool",
        timeout_ms=config.store.timeout_ms,
        owner="ucm check",
    )
    alone = PipelineSpec("check", (stage,), "")
    return open_store(
        alone.name,
        stages=host.stages,
        pipelines={alone.name: alone},
        stage_configs=config.stages,
        store_config=config.store.model_copy(update={"staging_buffer_gb": BUFFER_BYTES}),
        context=context,
    )


def _rows(
    block: Bytes, memory: Bytes
) -> tuple[Bytes, npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """(ids, shards, addresses) of the block in ``memory``."""
    shards = np.arange(SHARDS, dtype=np.uint32)
    at = memory.ctypes.data + shards.astype(np.uint64)[:, None] * np.uint64(SHARD_BYTES)
    return np.repeat(block, SHARDS, axis=0), shards, at


def _dump(store: BlockStore, block: Bytes, data: Bytes) -> tuple[Bytes, npt.NDArray[np.int32]]:
    task = store.dump(*_rows(block, data))
    return task.wait_durable(), task.durable_errnos()


def _load(store: BlockStore, block: Bytes, data: Bytes) -> tuple[Bytes, npt.NDArray[np.int32]]:
    task = store.load(*_rows(block, data))
    return task.wait(), task.errnos()


def _expect(what: str, stage: str, statuses: Bytes, errnos: npt.NDArray[np.int32]) -> None:
    failed = np.flatnonzero(statuses != Status.OK)
    if len(failed):
        status, number = Status(int(statuses[failed[0]])), int(errnos[failed[0]])
        why = f": {errno.errorcode.get(number, number)} ({os.strerror(number)})" if number else ""
        raise StoreError(f"stage {stage} could not {what} a block: {status.name.lower()}{why}")
