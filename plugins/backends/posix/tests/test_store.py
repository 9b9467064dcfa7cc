"""Posix through the store: what an engine adapter sees."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest
from posix_store import PosixStore, geometry, object_path
from pydantic import ValidationError

from ucm_backend_posix.config import PosixConfig
from ucm_core import _native
from ucm_core.errors import ConfigError
from ucm_core.store.contract import Status

OK = Status.OK


@pytest.mark.parametrize("engine", ["auto", "io_uring", "aio", "psync"])
@pytest.mark.parametrize("direct", [True, False])
def test_dump_lookup_load(tmp_path: Path, engine: str, direct: bool) -> None:
    if engine == "aio" and not direct:
        pytest.skip("aio needs io_direct")
    options = {"posix_io_engine": engine, "io_direct": direct}
    try:
        store = PosixStore([tmp_path], options=options)
    except ConfigError as error:
        if engine == "auto":
            raise
        pytest.skip(str(error))
    with store:
        assert store.dump(range(40)) == [OK] * 40
        assert store.present(range(45)) == [True] * 40 + [False] * 5
        assert store.load(range(45)) == [OK] * 40 + [Status.MISS] * 5
    with PosixStore([tmp_path], options=options) as again:
        assert again.load(range(40)) == [OK] * 40


def test_files_are_private_and_named_by_id(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "er"
    with PosixStore([root]) as store:
        store.dump([1])
    path = object_path(root, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent, root, root.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert path.stat().st_size == 4096 + 4 * 8192


def test_corrupt_is_reported_removed_and_healed_by_the_next_dump(tmp_path: Path) -> None:
    with PosixStore([tmp_path]) as store:
        store.dump(range(3))
        path = object_path(tmp_path, 1)
        data = bytearray(path.read_bytes())
        data[4096 + 8192 + 77] ^= 1
        path.write_bytes(data)
        assert store.load(range(3)) == [OK, Status.CORRUPT, OK]
        assert store.stat("read_corrupt_total") == 1
        assert store.present([1]) == [False]
        assert store.dump([1]) == [OK]
        assert store.load(range(3)) == [OK] * 3


def test_negative_control_without_checksums_flipped_bytes_come_through(tmp_path: Path) -> None:
    with PosixStore([tmp_path], options={"posix_verify_checksums": False}) as store:
        store.dump([1])
        path = object_path(tmp_path, 1)
        data = bytearray(path.read_bytes())
        data[4096 + 5] ^= 0xFF
        path.write_bytes(data)
        statuses, memory = store.load_bytes([1])
        assert statuses == [OK]
        assert memory[0].tobytes()[5] == data[4096 + 5]


def test_b31_files_and_directories_vanish_while_running(tmp_path: Path) -> None:
    with PosixStore([tmp_path]) as store:
        store.dump(range(30))
        object_path(tmp_path, 3).unlink()
        shutil.rmtree(object_path(tmp_path, 7).parent)
        gone = {3} | {n for n in range(30) if not object_path(tmp_path, n).exists()}
        expected = [Status.MISS if n in gone else OK for n in range(30)]
        assert store.present(range(30)) == [n not in gone for n in range(30)]
        assert store.load(range(30)) == expected
        assert store.dump(sorted(gone)) == [OK] * len(gone)
        assert store.load(range(30)) == [OK] * 30

        shutil.rmtree(tmp_path / "ns-test")  # the whole namespace
        assert store.present(range(30)) == [False] * 30
        assert set(store.load(range(30))) == {Status.MISS}
        assert store.dump(range(30)) == [OK] * 30
        assert store.load(range(30)) == [OK] * 30


def test_destroyed_root_fails_dumps_and_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with PosixStore([root]) as store:
        store.dump(range(5))
        shutil.rmtree(root)
        assert store.present(range(5)) == [False] * 5
        assert OK not in store.dump(range(5, 15))
        assert not root.exists(), "a lost directory must not be made again behind the operator"
        assert str(root) in store.store.health()["Posix"]
        root.mkdir()
        end = time.monotonic() + 20
        while store.dump([20]) != [OK]:
            assert time.monotonic() < end, "the root did not come back"
            time.sleep(0.05)
        assert store.load([20]) == [OK]
        assert store.store.health()["Posix"] == ""


def test_b35_same_file_size_other_geometry_is_a_miss_and_not_removed(tmp_path: Path) -> None:
    with PosixStore([tmp_path], shape=geometry(4, 8192)) as a:
        a.dump([1])
    path = object_path(tmp_path, 1)
    before = path.read_bytes()
    for other in (geometry(2, 16384), geometry(2, 8192), geometry(4, 8192, "another-layout")):
        with PosixStore([tmp_path], shape=other) as b:
            assert b.load([1]) == [Status.MISS]
            assert b.stat("read_foreign_total") == 1
    with PosixStore([tmp_path], digest=b"\x08" * 32) as other_namespace:
        assert other_namespace.load([1]) == [Status.MISS]
    assert path.read_bytes() == before


def test_b34_unwritable_root_is_refused_with_path_and_errno(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(ConfigError) as refused:
        PosixStore([tmp_path / "good", blocked])
    assert str(blocked) in str(refused.value)
    assert "ENOTDIR" in str(refused.value)


def test_order_of_roots_does_not_matter(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "abc"]
    with PosixStore(roots) as store:
        assert store.dump(range(60)) == [OK] * 60
    counts = [sum(1 for _ in root.glob("ns-test/??/*")) for root in roots]
    assert sum(counts) == 60
    assert min(counts) > 5, counts
    with PosixStore(roots[::-1]) as store:
        assert store.load(range(60)) == [OK] * 60


def test_scheduler_role_looks_up_without_io_threads(tmp_path: Path) -> None:
    with PosixStore([tmp_path]) as worker:
        worker.dump(range(4))
        threads = len(os.listdir("/proc/self/task"))
        with PosixStore([tmp_path], role="scheduler") as scheduler:
            assert scheduler.present(range(5)) == [True] * 4 + [False]
            names = [
                Path(f"/proc/self/task/{t}/comm").read_text() for t in os.listdir("/proc/self/task")
            ]
            assert len(names) - threads <= 6, names


def test_tools_take_no_lease(tmp_path: Path) -> None:
    with PosixStore([tmp_path], role="tool"):
        assert not (tmp_path / ".ucm-gc").exists()


def test_other_gc_settings_are_refused_with_both(tmp_path: Path) -> None:
    with (
        PosixStore([tmp_path], options={"posix_capacity_gb": "1 GiB"}),
        pytest.raises(ConfigError) as refused,
    ):
        PosixStore([tmp_path], options={"posix_capacity_gb": "2 GiB"})
    assert f"capacity_bytes={1 << 30}" in str(refused.value)
    assert f"capacity_bytes={2 << 30}" in str(refused.value)
    with PosixStore([tmp_path], options={"posix_capacity_gb": "2 GiB"}):
        pass  # nobody else is left


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        ({"posix_io_engine": "aio", "io_direct": False}, "needs io_direct"),
        ({"posix_gc_recycle_percent": 0.9}, "remove everything"),
        ({"posix_io_engine": "uring"}, "io_uring"),
        ({"storage_backends": "relative"}, "absolute"),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], piece: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PosixConfig(**{"storage_backends": "/x", **options})
    assert piece in str(refused.value)


def test_native_engine_refusal_names_the_alternatives(tmp_path: Path) -> None:
    shape = _native.Geometry(1, 4096, 1, [(4096, 1, 0)], "x")
    with pytest.raises(_native.PosixSetupError, match=r"warp.*psync"):
        _native.PosixStage(
            shape,
            roots=[str(tmp_path)],
            namespace_dir="n",
            namespace_digest=bytes(32),
            engine="warp",
        )
