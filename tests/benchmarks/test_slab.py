"""The benchmark of the layout slab runs, on a shape that takes no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import slab
from benchmarks.support.limits import Limits
from benchmarks.support.pipelines import Workload
from benchmarks.support.report import Report
from benchmarks.support.shapes import CacheShape

PROGRAM = Path(__file__).resolve().parents[2] / "build/dev/native/ucm_limits"


def test_transfers_and_lookups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CacheShape("small", "", layers=2, page_bytes=4096, runs=2, objects=40)
    monkeypatch.setattr(slab, "TARGET_SHAPE", shape.name)
    monkeypatch.setattr(slab, "EXISTING", 200)
    monkeypatch.setattr(slab, "LOOKUP_SHAPE", CacheShape("tiny", "", 1, 4096, 1, 200))
    report = Report()
    with Limits(PROGRAM) as limits:
        slab.transfers(report, limits, tmp_path, Workload(shape), rounds=2)
    slab.lookups(report, tmp_path, rounds=2)
    assert [target.what for target in report.targets] == [
        "cold load (slab) / raw O_DIRECT, throughput",
        "dump (slab) / raw O_DIRECT, throughput",
        "lookup of 10,000 ids (slab)",
    ]
    assert all(target.measured > 0 for target in report.targets)
