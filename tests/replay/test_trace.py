"""Real requests through the real store: with room for everything, every hit there can be, exactly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ucm_core import _native
from ucm_core.store.native_store import NativeBlockStore, native_geometry
from ucm_core.testing.small_store import small_store

from .conversation import (
    DISTINCT,
    GEOMETRY,
    REFERENCES,
    REQUESTS,
    UNLIMITED_HITS,
    replay,
    requests,
    unlimited_hits,
)

SCRIPT = Path(__file__).parent / "replay_process.py"


def test_the_trace_is_the_published_one() -> None:
    listed = list(requests())
    assert len(listed) == REQUESTS
    assert sum(map(len, listed)) == REFERENCES
    assert len({block for blocks in listed for block in blocks}) == DISTINCT
    assert unlimited_hits() == UNLIMITED_HITS


def opened(medium: _native.FakeMedium, cache_slots: int) -> NativeBlockStore:
    """``cache_slots``: over a host cache of so many blocks, 0: over staging buffers."""
    stage = _native.FakeStage(native_geometry(GEOMETRY), medium, lanes=4)
    depths = {"waiting_depth": 10_000, "running_depth": 64}
    sizes = {"cache_slots": cache_slots, "load_reserve": 16, "shared": 512}
    return small_store(stage, GEOMETRY, **sizes, **depths)


def test_unlimited_capacity_also_across_a_restart() -> None:
    """Half of the requests, a new store over what the first one left, the other half. A small host
    cache above forgets most of it, which changes nothing: what it lost lies below."""
    medium = _native.FakeMedium()
    hits = 0
    half = REQUESTS // 2
    for begin, end, cache_slots in ((0, half, 0), (half, REQUESTS, 1000)):
        with opened(medium, cache_slots) as store:
            hits += replay(store, begin, end)
    assert hits == UNLIMITED_HITS
    assert len(medium) == DISTINCT


def serve(root: Path, begin: int, end: int) -> int:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root), str(begin), str(end)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_files_across_two_processes(tmp_path: Path) -> None:
    """The same over files, for the first requests; the second process knows only the directory."""
    cuts = [(0, 250), (250, 500)]
    assert [serve(tmp_path, *cut) for cut in cuts] == [unlimited_hits(*cut) for cut in cuts]


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_files_across_two_processes_whole(tmp_path: Path) -> None:
    half = REQUESTS // 2
    assert serve(tmp_path, 0, half) + serve(tmp_path, half, REQUESTS) == UNLIMITED_HITS
