"""What SGLang is told about pages and bandwidth, and what is exported beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from host_pools import Rank, keys, serve
from ucm_core.store.contract import Status
from ucm_sglang.stats import COUNTERS, UcmCounters

LABELS = {"tp_rank": "0", "pp_rank": "0"}


def exported(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"ucm:ucm_{name}_total", LABELS | labels) or 0.0


def test_pages_and_bandwidth_go_through_sglangs_own_metrics(tmp_path: Path) -> None:
    serve()
    one = Rank(tmp_path)
    source = one.fill(3)
    assert all(one.backend.batch_set_v1(keys(3), source))
    assert one.backend.batch_get_v1(keys(4), one.empty(4)) == [True, True, True, False]
    taken = one.backend.get_stats()
    assert taken.backup_pgs == [3]
    assert taken.prefetch_pgs == [3]
    assert all(rate > 0 for rate in (*taken.backup_bandwidth, *taken.prefetch_bandwidth))
    again = one.backend.get_stats()
    assert again.backup_pgs == again.prefetch_pgs == []
    one.close()


def test_ours_are_exported_when_sglang_exports(tmp_path: Path) -> None:
    """Also by a backend that is attached again."""
    serve()
    for _ in range(2):
        before = exported("load_pages"), exported("load_failed_pages", kind="miss")
        one = Rank(tmp_path, told={"enable_storage_metrics": True})
        assert all(one.backend.batch_set_v1(keys(2), one.fill(2)))
        one.backend.batch_get_v1(keys(3), one.empty(3))
        after = exported("load_pages"), exported("load_failed_pages", kind="miss")
        assert (after[0] - before[0], after[1] - before[1]) == (2, 1)
        one.close()


def test_partial_failures_are_no_hits() -> None:
    """B54: results of a batch are counted page by page."""
    counters = UcmCounters(exported=False, labels=LABELS)
    results = np.array([Status.OK, Status.MISS, Status.CORRUPT, Status.OK], np.uint8)
    counters.moved("load", results, 100, 0.5)
    assert counters.snapshot() == {
        "load_pages": 2,
        "load_bytes": 200,
        "load_seconds": 0.5,
        "load_failed_pages|miss": 1,
        "load_failed_pages|corrupt": 1,
    }


def test_nothing_is_counted_under_an_unknown_name() -> None:
    counters = UcmCounters(exported=True, labels=LABELS)
    for name, (_, has_kind) in COUNTERS.items():
        counters.add(name, 1, "x" if has_kind else "")
    with pytest.raises(ValueError):
        counters.add("load_pages", 1, "x")


def test_the_counters_need_no_sglang() -> None:
    """The documentation is made from them where no engine is."""
    code = "import sys, ucm_sglang.stats; print('sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
