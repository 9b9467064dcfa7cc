"""The health wrapper around Posix: a directory that stops working costs misses, and comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from posix_store import NAMESPACE, PosixStore

from ucm_core.store.config import HealthConfig
from ucm_core.store.contract import Status

#: Quick enough for a test; 4 good probes close it.
QUICK = HealthConfig(interval_ms=20, timeout_ms=2_000, window=4, failures=2)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def remove_root(root: Path, away: Path) -> None:
    root.rename(away)


def file_instead(root: Path, away: Path) -> None:
    root.rename(away)
    root.write_text("not a directory")


def fifo_instead(root: Path, away: Path) -> None:
    root.rename(away)
    os.mkfifo(root)


def fifo_instead_of_the_namespace(root: Path, away: Path) -> None:
    (root / NAMESPACE).rename(away)
    os.mkfifo(root / NAMESPACE)


def repair(root: Path, away: Path) -> None:
    place = root if (away / ".ucm-root").exists() else root / NAMESPACE
    place.unlink(missing_ok=True)
    away.rename(place)


@pytest.mark.parametrize(
    "break_it", [remove_root, file_instead, fifo_instead, fifo_instead_of_the_namespace]
)
def test_b56_a_broken_directory_is_misses_at_once_and_comes_back(
    tmp_path: Path, break_it: Callable[[Path, Path], None]
) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    with PosixStore([root], health=QUICK) as store:
        assert store.dump(range(10)) == [Status.OK] * 10
        break_it(root, away)
        assert eventually(lambda: store.stat("health_open") == 1)
        assert "out of service" in store.store.health()["Posix"]
        assert str(root) in store.store.health()["Posix"]

        started = time.monotonic()
        for number in range(100):
            assert store.load([number % 10]) == [Status.MISS]
            assert store.present([number % 10]) == [False]
        assert store.dump([99]) == [Status.REJECTED]
        assert time.monotonic() - started < 5.0
        assert store.stat("health_refused_reads_total") == 100
        assert store.stat("health_refused_writes_total") == 1

        repair(root, away)
        assert eventually(lambda: store.stat("health_open") == 0)
        assert store.store.health()["Posix"] == ""
        assert store.load(range(10)) == [Status.OK] * 10
        assert store.dump([99]) == [Status.OK]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into every directory")
def test_a_directory_made_unwritable_is_taken_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with PosixStore([root], health=QUICK) as store:
        (root / NAMESPACE).chmod(0o500)
        try:
            assert eventually(lambda: store.stat("health_open") == 1)
        finally:
            (root / NAMESPACE).chmod(0o700)
        assert eventually(lambda: store.stat("health_open") == 0)


def test_the_host_cache_above_goes_on_serving(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    cache = {"cache_buffer_capacity_gb": "8 MiB", "share_buffer_enable": False}
    with PosixStore([root], cache=cache, health=QUICK) as store:
        assert store.dump(range(4)) == [Status.OK] * 4
        remove_root(root, away)
        assert eventually(lambda: store.stat("health_open") == 1)
        assert store.load(range(4)) == [Status.OK] * 4, "it holds them"
        assert store.load([50]) == [Status.MISS]
        assert store.dump([5]) == [Status.REJECTED], "saved is what the last stage has"
        assert store.load([5]) == [Status.OK], "but the node keeps it"


def test_without_the_wrapper_nothing_is_probed(tmp_path: Path) -> None:
    with PosixStore([tmp_path], health=HealthConfig(enabled=False)) as store:
        assert not [name for name in store.store.stats() if "health" in name]


def test_probes_leave_nothing_in_the_directory(tmp_path: Path) -> None:
    with PosixStore([tmp_path], health=QUICK) as store:
        assert eventually(lambda: store.stat("health_probes_total") >= 3)
    left = [p for p in tmp_path.rglob("*") if p.is_file() and not p.name.startswith(".ucm")]
    assert not left
