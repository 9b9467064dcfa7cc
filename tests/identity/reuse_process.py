"""One process of a deployment, reduced to identity and store: dumps, looks up, or loads a prompt.

Run as a script: ``reuse_process.py ROOT ACTION FACTS`` with facts as JSON; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ucm_backend_posix.build import build_posix
from ucm_backend_posix.config import PosixConfig
from ucm_core.identity import ContentChain, ModelIdentity, open_namespace, weights_identity
from ucm_core.registry import PipelineSpec, StageContext, StageSpec
from ucm_core.spec import GroupSpec, KeySpace, Kind, SpecTable
from ucm_core.store.config import StoreConfig
from ucm_core.store.contract import Geometry, RunShape, Status
from ucm_core.store.pipeline import open_store

BLOCKS, LAYERS, SHARD_BYTES = 4, 2, 4096


def run(root: str, action: str, facts: dict[str, Any]) -> dict[str, Any]:
    """``dump``: four blocks, filled from the tokens. ``find``: index of the last hit. ``load``: their
    bytes' sum. ``facts``: block_tokens, model_dir, and what :class:`ModelIdentity` takes."""
    block_tokens = facts.pop("block_tokens", 64)
    manifest = open_namespace([root], block_tokens=block_tokens)
    weights = weights_identity(facts.pop("model_dir"), cache_dir=Path(root) / "kept")
    table = SpecTable(
        [GroupSpec("kv", Kind.CHAIN, tuple(range(LAYERS)), manifest.block_tokens, 64)],
        grain=manifest.block_tokens,
        num_layers=LAYERS,
    )
    (at,) = KeySpace(table, ModelIdentity(weights.value, **facts)).of("kv")
    chain = ContentChain(manifest.block_tokens)
    chain.extend(np.arange(BLOCKS * manifest.block_tokens, dtype=np.uint32))
    ids = chain.object_ids(at.seed)
    geometry = Geometry(LAYERS, SHARD_BYTES, 1, RunShape(SHARD_BYTES), "uint8|layer:2,elem:4096")
    store = open_store(
        "Posix",
        stages={"Posix": StageSpec("Posix", "", PosixConfig, build_posix)},
        pipelines={"Posix": PipelineSpec("Posix", ("Posix",), "")},
        stage_configs={"Posix": PosixConfig(storage_backends=root)},
        store_config=StoreConfig(),
        context=StageContext(geometry, manifest.directory_name, manifest.digest, "worker"),
    )
    try:
        return {"found": store.lookup_on_prefix(ids), **_transfer(store, action, ids)}
    finally:
        store.close()


def _transfer(store: Any, action: str, ids: np.ndarray) -> dict[str, Any]:
    if action == "find":
        return {}
    memory = np.zeros((BLOCKS * LAYERS, SHARD_BYTES), np.uint8)
    rows = memory.ctypes.data + np.arange(len(memory), dtype=np.uint64)[:, None] * SHARD_BYTES
    which = (np.repeat(ids, LAYERS, axis=0), np.tile(np.arange(LAYERS, dtype=np.uint32), BLOCKS))
    if action == "dump":
        memory[:] = np.arange(len(memory))[:, None] + 1
        results = store.dump(*which, rows.astype(np.uint64)).wait_durable(30)
    else:
        results = store.load(*which, rows.astype(np.uint64)).wait(30)
    return {
        "ok": bool((results == Status.OK).all()),
        "rows": memory[:, 0].tolist(),
        "memory": int(memory.sum(dtype=np.int64)),
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
