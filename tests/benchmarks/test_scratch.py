"""The directory of a run: its files go at the end, and the next run knows how long ago."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.__main__ import INODE_REST_S, REMOVED_MARK, removed_s_ago, scratch_directory


def test_files_stay_until_the_end_and_their_removal_is_remembered(tmp_path: Path) -> None:
    below = tmp_path / "data"
    assert removed_s_ago(below) is None
    with scratch_directory(below) as made:
        (made / "file").write_bytes(b"x")
        assert removed_s_ago(below) is None
    assert not made.exists()
    age = removed_s_ago(below)
    assert age is not None and age < 60


def test_an_old_removal_does_not_matter(tmp_path: Path) -> None:
    with scratch_directory(tmp_path):
        pass
    long_ago = time.time() - INODE_REST_S - 1
    os.utime(tmp_path / REMOVED_MARK, (long_ago, long_ago))
    assert removed_s_ago(tmp_path) is None
