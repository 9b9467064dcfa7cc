"""Namespaces: written once, agreed on in a race, refused on mismatch with both values."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from ucm_core.errors import ConfigError
from ucm_core.identity import Manifest, namespace, open_namespace


def test_first_writer_decides_and_later_ones_take_it(tmp_path: Path) -> None:
    first = open_namespace([tmp_path], first_head_slices=4)
    assert (first.block_tokens, first.head_slices) == (64, 4)
    assert open_namespace([tmp_path], first_head_slices=2) == first
    assert open_namespace([tmp_path], block_tokens=64, head_slices=4) == first
    assert [p.name for p in (tmp_path / "default").iterdir()] == ["manifest.json"]


def test_b05_other_block_tokens_is_refused_with_both_values(tmp_path: Path) -> None:
    open_namespace([tmp_path], block_tokens=64)
    with pytest.raises(ConfigError) as e:
        open_namespace([tmp_path], block_tokens=16, head_slices=2)
    text = str(e.value)
    assert "64" in text and "16" in text and str(tmp_path) in text and "another namespace" in text
    assert len(e.value.problems) == 2
    assert open_namespace([tmp_path], "other", block_tokens=16).block_tokens == 16


def _race(root: str, barrier: Any, results: Any, block: int) -> None:
    barrier.wait(20)
    results.put(open_namespace([root], first_block_tokens=block).block_tokens)


def test_racing_processes_agree(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    for round_ in range(5):
        root = tmp_path / str(round_)
        barrier, results = spawn.Barrier(4), spawn.Queue()
        workers = [
            spawn.Process(target=_race, args=(str(root), barrier, results, 16 << i))
            for i in range(4)
        ]
        for w in workers:
            w.start()
        seen = {results.get(timeout=20) for _ in workers}
        for w in workers:
            w.join(20)
            assert w.exitcode == 0
        assert len(seen) == 1
        assert [p.name for p in (root / "default").iterdir()] == ["manifest.json"]


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    first = open_namespace([tmp_path], block_tokens=32)
    assert open_namespace([tmp_path], first_block_tokens=128) == first
    assert [p.name for p in (tmp_path / "default").iterdir()] == ["manifest.json"]


def test_half_written_manifest_is_refused_after_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace, "_WRITE_WAIT_S", 0.1)
    path = tmp_path / "default" / "manifest.json"
    path.parent.mkdir()
    path.write_bytes(Manifest("default", 64, 1).to_bytes()[:-5])
    with pytest.raises(ConfigError, match="not a manifest"):
        open_namespace([tmp_path])


@pytest.mark.parametrize(
    ("change", "expect"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"block_tokens": "64"}, "damaged"),
        ({"surprise": 1}, "damaged"),
        ({"block_tokens": 0}, ">= 1"),
        ({"name": "other"}, "renamed"),
    ],
)
def test_foreign_manifests(tmp_path: Path, change: dict[str, Any], expect: str) -> None:
    open_namespace([tmp_path])
    path = tmp_path / "default" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}) + "\n")
    with pytest.raises(ConfigError, match=expect):
        open_namespace([tmp_path])


def test_roots_must_agree(tmp_path: Path) -> None:
    a, b, c = (tmp_path / x for x in "abc")
    open_namespace([a], block_tokens=16)
    open_namespace([b], block_tokens=32)
    with pytest.raises(ConfigError, match="disagree"):
        open_namespace([a, b])
    assert open_namespace([a, c]).block_tokens == 16  # a new root takes the first one's
    assert open_namespace([c]).block_tokens == 16


def test_unusable_root_names_path_and_errno(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*errno 20"):
        open_namespace([tmp_path / "file"])


def test_digest_tells_every_field_apart() -> None:
    base = Manifest("default", 64, 1)
    others = [Manifest("b", 64, 1), Manifest("default", 128, 1), Manifest("default", 64, 2)]
    assert len({m.digest for m in (base, *others)}) == 4


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x" * 65, "a b"])
def test_names_are_safe_path_components(name: str) -> None:
    with pytest.raises(ConfigError, match="directory name"):
        Manifest(name, 64, 1)
