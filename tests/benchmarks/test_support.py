"""The harness itself: a benchmark that measures the wrong thing is worse than none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.support.meter import Sample, Series, cpu_ratio, interleave, measure, wall_ratio
from benchmarks.support.opcodes import count_opcodes
from benchmarks.support.report import Report, Table, Target
from benchmarks.support.shapes import SHAPES, CacheShape


def test_interleave_runs_every_contestant_once_a_round_and_rotates() -> None:
    calls: list[str] = []

    def contestant(name: str) -> Sample:
        calls.append(name)
        return Sample(float(len(calls)), 0.0)

    names = ("a", "b", "c")
    series = interleave({n: lambda n=n: contestant(n) for n in names}, rounds=3, warmups=1)
    rounds = [calls[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert [r[0] for r in rounds[1:]] == ["a", "b", "c"]
    assert [len(s.samples) for s in series.values()] == [3, 3, 3]


def test_ratio_is_paired_per_round() -> None:
    """A round in which the machine was slow for both sides does not move the ratio."""
    ours = Series([Sample(1.0, 2.0), Sample(100.0, 2.0), Sample(1.0, 2.0)])
    reference = Series([Sample(2.0, 1.0), Sample(200.0, 1.0), Sample(2.0, 1.0)])
    assert wall_ratio(ours, reference) == 0.5
    assert cpu_ratio(ours, reference) == 2.0


def test_measure_counts_cpu_of_the_call() -> None:
    sample = measure(lambda: sum(range(300_000)), nbytes=10, operations=2)
    assert 0 < sample.cpu_s <= sample.wall_s * 4
    assert (sample.nbytes, sample.operations) == (10, 2)


@pytest.mark.parametrize(
    ("sense", "measured", "met"),
    [("at most", 1.0, True), ("at most", 1.01, False), ("at least", 0.99, False)],
)
def test_target_is_met_or_not(sense: str, measured: float, met: bool) -> None:
    target = Target("x", sense, 1.0, measured)  # type: ignore[arg-type]
    assert target.met is met
    assert ("yes" in target.row()[3]) is met


def test_report_names_what_was_not_measured() -> None:
    report = Report()
    report.table(Table("T", ("a", "b"), [("1", "2"), ("Cache|Posix", "3")]))
    report.skip("TTFT", "no engine")
    page = report.markdown([("CPU", "a CPU")])
    assert "| a CPU |" in page
    assert "- TTFT: no engine" in page
    assert "| 1 | 2 |" in page
    assert "| Cache\\|Posix | 3 |" in page


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_shape_addresses_are_distinct_pages_inside_the_cache(
    shape: CacheShape, tmp_path: Path
) -> None:
    base = 1 << 20
    addresses = shape.addresses(base)
    assert addresses.shape == (shape.objects * shape.layers, shape.runs)
    assert len(np.unique(addresses)) == addresses.size
    assert int(addresses.min()) >= base
    assert int(addresses.max()) + shape.page_bytes <= base + shape.engine_bytes
    assert np.all((addresses - np.uint64(base)) % np.uint64(shape.page_bytes) == 0)
    order = shape.limit_arguments(tmp_path)["order"]
    assert isinstance(order, Path)
    assert order.stat().st_size == 4 * shape.objects * shape.runs


def test_opcode_count_sees_a_python_loop_and_not_a_vectorised_one() -> None:
    def looped(n: int) -> int:
        return count_opcodes(lambda: [i + 1 for i in range(n)], (__name__,))

    def vectorised(n: int) -> int:
        return count_opcodes(lambda: np.arange(n) + 1, (__name__,))

    assert looped(1000) > looped(10) + 900
    assert vectorised(100_000) == vectorised(10)
