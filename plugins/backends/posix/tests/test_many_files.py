"""A directory of very many files: lookups stay as quick as with few, a collection ends and is exact."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from posix_store import NAMESPACE, PosixStore, geometry, object_path

from ucm_core.store.contract import Status

_SHAPE = geometry(2, 4096)


def _names(count: int) -> list[str]:
    rng = np.random.default_rng(7)
    return [row.tobytes().hex() for row in rng.integers(0, 256, (count, 16), dtype=np.uint8)]


def _fill(root: Path, count: int) -> list[str]:
    """Sparse files of the right size and name; the first are the coldest."""
    with PosixStore([root], shape=_SHAPE) as store:
        assert store.dump([0]) == [Status.OK]
    size = object_path(root, 0).stat().st_size
    names, now = _names(count), time.time()
    for i in range(256):
        (root / NAMESPACE / f"{i:02x}").mkdir(exist_ok=True)
    for i, name in enumerate(names):
        path = root / NAMESPACE / name[:2] / name
        with path.open("wb") as file:
            file.truncate(size)
        os.utime(path, (now - 2 * count + i, now - 2 * count + i))
    return names


def _lookup_seconds(store: PosixStore, names: list[str], expected: bool) -> float:
    ids = np.frombuffer(bytes.fromhex("".join(names)), dtype=np.uint8).reshape(-1, 16)
    began = time.monotonic()
    found = store.store.lookup(ids)
    took = time.monotonic() - began
    assert bool(found.all()) if expected else not found.any()
    return took


@pytest.mark.parametrize(
    "count", [6_000, pytest.param(1_000_000, marks=pytest.mark.long)], ids=["6k", "1M"]
)
def test_lookup_and_collection_are_bounded(tmp_path: Path, count: int) -> None:
    names = _fill(tmp_path, count)
    size = object_path(tmp_path, 0).stat().st_size
    # All files are 0.9 of the capacity: a round goes down to 0.6, a third of them.
    capacity = int((count + 1) * size / 0.9)
    options = {
        "posix_capacity_gb": f"{capacity} B",
        "posix_gc_check_interval_sec": 3600,
    }
    with PosixStore([tmp_path], shape=_SHAPE) as store:
        few = names[:: count // 1000]
        strangers = _names(count + 1000)[-1000:]
        # 100 us an id is far from the few that a stat takes, and far below reading directories.
        assert _lookup_seconds(store, few, True) < 0.1 * len(few) / 1000
        assert _lookup_seconds(store, strangers, False) < 0.1
    with PosixStore([tmp_path], shape=_SHAPE, options=options) as store:
        end = time.monotonic() + 20 + count * 200e-6
        while store.stat("gc_removed_total") == 0 or store.stat("gc_used_bytes") > 0.61 * capacity:
            assert time.monotonic() < end, f"a round over {count} files does not end"
            time.sleep(0.05)
        gone = store.stat("gc_removed_total")
        assert abs(gone - count / 3) < count / 100
        # Globally the coldest: those of all directories, not so many of each.
        assert _lookup_seconds(store, names[gone + count // 100 :: count // 1000], True) < 0.1
        assert _lookup_seconds(store, names[: gone - count // 100 : count // 1000], False) < 0.1
        # The directory still takes dumps and serves loads.
        assert store.dump(range(1, 9)) == [Status.OK] * 8
        assert store.load(range(9)) == [Status.OK] * 9
