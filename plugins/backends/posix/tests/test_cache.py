"""`Cache|Posix` through the store: what is hot, what is cold, who shares, what is refused."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from posix_store import PosixStore, geometry, ids_of, object_path

from ucm_backend_posix.cache import CacheConfig, host_memory
from ucm_core.config.machine import Machine
from ucm_core.errors import ConfigError
from ucm_core.store.contract import Status

OK, MISS = Status.OK, Status.MISS
SMALL = {"cache_buffer_capacity_gb": "2 MiB", "cache_load_exclusive_buffer_number": 0}

Opener = Callable[..., PosixStore]


@pytest.fixture
def open_cached(tmp_path: Path) -> Iterator[Opener]:
    """``open_cached(**fields of PosixStore)``; closed at the end, and no segment may stay behind."""
    stores: list[PosixStore] = []

    def make(**fields: Any) -> PosixStore:
        fields.setdefault("cache", SMALL)
        store = PosixStore([tmp_path], **fields)
        stores.append(store)
        return store

    before = set(os.listdir("/dev/shm"))
    yield make
    while stores:
        stores.pop().close()
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("ucm-cache-")}
    assert not {name for name in left if _dead(name)}


def _dead(name: str) -> bool:
    from ucm_core import _native

    return name in _native.reclaim_dead_caches()


def _until_unpinned(store: PosixStore, within_s: float = 5.0) -> None:
    """The copier lets go of a slot a moment after it told the result; never longer than that."""
    deadline = time.monotonic() + within_s
    while store.cached("slots_pinned") and time.monotonic() < deadline:
        time.sleep(0.001)
    assert store.cached("slots_pinned") == 0


def test_what_was_dumped_is_hot_and_on_disk(open_cached: Opener, tmp_path: Path) -> None:
    store = open_cached()
    assert store.dump(range(8)) == [OK] * 8
    assert all(object_path(tmp_path, n).exists() for n in range(8))
    assert store.load(range(8)) == [OK] * 8
    assert store.cached("shards_hit_total") == 8 * store.shape.shard_count
    assert store.stat("read_bytes_total") == 0
    _until_unpinned(store)


def test_cold_then_hot(open_cached: Opener) -> None:
    with PosixStore([open_cached().roots[0]]) as plain:
        plain.dump(range(6))
    store = open_cached()
    assert store.present(range(7)) == [True] * 6 + [False]
    assert store.load(range(6)) == [OK] * 6
    cold = store.stat("read_bytes_total")
    assert cold > 0
    assert store.load(range(6)) == [OK] * 6
    assert store.stat("read_bytes_total") == cold


def test_prefetch_makes_hot(open_cached: Opener) -> None:
    with PosixStore([open_cached().roots[0]]) as plain:
        plain.dump(range(4))
    store = open_cached()
    store.store.prefetch(ids_of(range(4)))
    deadline = time.monotonic() + 10
    while store.cached("slots_ready") < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    cold = store.stat("read_bytes_total")
    assert store.load(range(4)) == [OK] * 4
    assert store.stat("read_bytes_total") == cold


def test_more_blocks_than_slots(open_cached: Opener) -> None:
    store = open_cached()
    slots = store.cached("slots_max")
    count = 3 * slots
    assert store.dump(range(count)) == [OK] * count
    assert store.cached("slots") == slots
    assert store.cached("evictions_total") >= count - slots
    assert store.load(range(count)) == [OK] * count  # evicted ones from the files


def test_an_absent_block_stays_absent_after_its_load_failed(open_cached: Opener) -> None:
    store = open_cached()
    assert store.load([5]) == [MISS]
    assert store.present([5]) == [False]
    assert store.load([5]) == [MISS]


def test_a_damaged_file_is_not_cached(open_cached: Opener, tmp_path: Path) -> None:
    with PosixStore([tmp_path]) as plain:
        plain.dump([1])
    path = object_path(tmp_path, 1)
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    store = open_cached()
    assert store.load([1]) == [Status.CORRUPT]
    assert store.present([1]) == [False]
    assert store.dump([1]) == [OK]
    assert store.load([1]) == [OK]


def test_a_destroyed_directory_is_told_apart_from_the_tier_above(
    open_cached: Opener, tmp_path: Path
) -> None:
    store = open_cached()
    assert store.dump([1]) == [OK]
    shutil.rmtree(tmp_path)
    tmp_path.write_text("not a directory")
    assert store.dump([2]) == [Status.IO_ERROR]  # wait_durable says so
    assert store.present([1, 2, 3]) == [True, True, False]  # what the host memory really holds
    assert store.load([1, 2]) == [OK, OK]
    tmp_path.unlink()


def test_backend_only_reads_again(open_cached: Opener) -> None:
    store = open_cached(cache={**SMALL, "cache_load_backend_only": True})
    assert store.dump([1]) == [OK]
    _until_unpinned(store)  # only what nobody holds is read again
    assert store.load([1]) == [OK]
    first = store.stat("read_bytes_total")
    assert first > 0
    _until_unpinned(store)
    assert store.load([1]) == [OK]
    assert store.stat("read_bytes_total") == 2 * first


def test_the_scheduler_watches_and_holds_nothing(open_cached: Opener, tmp_path: Path) -> None:
    scheduler = open_cached(role="scheduler")
    assert scheduler.present([1]) == [False]
    worker = open_cached()
    assert worker.dump([1]) == [OK]
    object_path(tmp_path, 1).unlink()  # only the host memory has it
    deadline = time.monotonic() + 5
    while scheduler.present([1]) == [False] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert scheduler.present([1]) == [True]
    scheduler.store.touch(ids_of([1]))
    scheduler.store.prefetch(ids_of([1]))
    with pytest.raises(Exception, match="only looks up"):
        scheduler.load([1])


def test_too_little_memory_is_refused_or_done_without(
    open_cached: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    huge = {"cache_buffer_capacity_gb": 1 << 20}
    with pytest.raises(ConfigError, match=r"needed .*available .*minimum"):
        open_cached(cache=huge)
    with caplog.at_level(logging.WARNING, "ucm.cache"):
        store = open_cached(cache={**huge, "cache_when_short": "without"})
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    assert store.dump([1]) == [OK]
    assert store.load([1]) == [OK]
    assert "staging.buffers" in store.store.stats()


def test_a_reserve_that_does_not_fit_names_the_minimum(open_cached: Opener) -> None:
    with pytest.raises(ConfigError, match=r"minimum 16\.\d+ MiB"):
        open_cached(cache={**SMALL, "cache_load_exclusive_buffer_number": 2048})


def test_another_capacity_is_refused_with_both_values(open_cached: Opener) -> None:
    open_cached()
    ready, child = _child("open", capacity="4 MiB", root=open_cached().roots[0])
    assert "2.00 MiB" in ready and "4.00 MiB" in ready
    child.communicate(timeout=20)


def test_private_caches_leave_no_name(open_cached: Opener) -> None:
    before = set(os.listdir("/dev/shm"))
    store = open_cached(cache={**SMALL, "share_buffer_enable": False})
    assert store.dump([1]) == [OK]
    assert store.load([1]) == [OK]
    assert set(os.listdir("/dev/shm")) == before


def test_other_directories_share_nothing(open_cached: Opener, tmp_path: Path) -> None:
    store = open_cached()
    assert store.dump([1]) == [OK]
    other = tmp_path / "other"
    with PosixStore([other], cache=SMALL) as elsewhere:
        assert elsewhere.present([1]) == [False]
        assert elsewhere.load([1]) == [MISS]


def test_groups_of_one_model_share_the_memory(open_cached: Opener) -> None:
    full = open_cached()
    window = open_cached(shape=geometry(2, 4096, "window"))
    assert full.dump(range(100)) == [OK] * 100
    assert window.dump(range(1000, 1010)) == [OK] * 10
    assert window.load(range(1000, 1010)) == [OK] * 10
    assert full.load(range(100)) == [OK] * 100
    assert full.cached("segment_bytes") == window.cached("segment_bytes")


def test_threads_of_one_store(open_cached: Opener) -> None:  # B61
    store = open_cached(cache={**SMALL, "cache_buffer_capacity_gb": "600 KiB"})
    assert 10 <= store.cached("slots_max") <= 20
    errors: list[BaseException] = []
    stop = time.monotonic() + 2

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while time.monotonic() < stop:
                numbers = [int(n) for n in rng.choice(64, 4, replace=False)]
                if rng.integers(2):
                    assert set(store.dump(numbers)) <= {OK}
                else:
                    assert set(store.load(numbers)) <= {OK, MISS}  # checks the bytes
                store.present(range(64))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.cached("slots_pinned") == 0


# -- several processes -------------------------------------------------------------------------------


def _child(
    command: str, *, root: Path, capacity: str = "2 MiB", rank: int = 1
) -> tuple[str, subprocess.Popen[str]]:
    """A worker in another process; returns its first line when it has done ``command``."""
    script = Path(__file__).with_name("cache_process.py")
    child = subprocess.Popen(
        [sys.executable, str(script), command, str(root), capacity, str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child.stdout.readline().strip(), child


def _end(child: subprocess.Popen[str], sig: int = signal.SIGKILL) -> None:
    child.send_signal(sig)
    child.communicate(timeout=20)


def test_one_process_finds_what_another_dumped(open_cached: Opener, tmp_path: Path) -> None:
    store = open_cached(ranks=2)
    line, child = _child("dump", root=tmp_path)
    assert line == "done"
    for number in range(4):
        object_path(tmp_path, number).unlink()
    assert store.load(range(4)) == [OK] * 4
    assert store.cached("processes_workers") == 2
    _end(child)
    assert store.load(range(4)) == [OK] * 4


def test_a_killed_process_leaves_nothing_behind(open_cached: Opener, tmp_path: Path) -> None:
    store = open_cached()
    for sig in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        line, child = _child("busy", root=tmp_path)
        assert line == "done"
        time.sleep(0.3)
        _end(child, sig)
    deadline = time.monotonic() + 10
    while store.cached("processes_workers") > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert store.cached("processes_workers") == 1
    assert store.cached("slots_pinned") == 0
    assert set(store.load(range(64))) <= {OK, MISS}
    assert store.dump(range(64)) == [OK] * 64


def test_restart_after_kill_takes_a_new_segment(open_cached: Opener, tmp_path: Path) -> None:
    for _ in range(3):
        line, child = _child("dump", root=tmp_path)
        assert line == "done"
        _end(child)
    store = open_cached()
    assert store.cached("created") == 1
    assert store.load(range(4)) == [OK] * 4  # from the files


def test_ranks_read_every_block_once(open_cached: Opener, tmp_path: Path) -> None:
    with PosixStore([tmp_path]) as plain:
        plain.dump(range(16))
    store = open_cached(ranks=2)
    line, child = _child("load-when-told", root=tmp_path)
    assert line == "ready"
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    assert store.load(range(16)) == [OK] * 16
    theirs = int(child.stdout.readline())
    _end(child)
    size = 16 * store.shape.shard_count * store.shape.shard_bytes
    assert size <= store.stat("read_bytes_total") + theirs < 1.2 * size


# -- options -----------------------------------------------------------------------------------------


def test_the_default_size_comes_from_the_machine() -> None:
    machine = Machine(64 << 30, 32 << 30, 6 << 30, 8)
    chosen = CacheConfig.choose({}, machine)
    assert chosen["cache_buffer_capacity_gb"].value == "3072 MiB"
    assert "/dev/shm" in chosen["cache_buffer_capacity_gb"].reason
    assert chosen["cache_when_short"].value == "without"
    private = CacheConfig.choose({"share_buffer_enable": False}, machine)
    assert private["cache_buffer_capacity_gb"].value == "4096 MiB"
    assert CacheConfig.choose({"cache_buffer_capacity_gb": 1}, machine) == {}


def test_host_memory_is_counted_per_node_or_per_rank() -> None:
    shared = host_memory(CacheConfig(cache_buffer_capacity_gb=1))
    assert (shared.per_node_bytes, shared.per_rank_bytes) == (1 << 30, 0)
    private = host_memory(CacheConfig(cache_buffer_capacity_gb=1, share_buffer_enable=False))
    assert (private.per_node_bytes, private.per_rank_bytes) == (0, 1 << 30)
