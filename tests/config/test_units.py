"""Sizes, times, directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from ucm_core.config.machine import Machine, free_bytes
from ucm_core.config.options import Options
from ucm_core.config.units import (
    GIB,
    GibAsBytes,
    Milliseconds,
    SecondsAsMs,
    display,
    format_size,
    parse_size_bytes,
    parse_time_ms,
)


@pytest.mark.parametrize(
    ("value", "plain_unit", "expected"),
    [
        (4, GIB, 4 * GIB),
        (0.5, GIB, GIB // 2),
        ("4", GIB, 4 * GIB),
        ("512 MiB", GIB, 512 << 20),
        ("512mb", 1, 512 << 20),
        ("1.5G", 1, 3 * GIB // 2),
        ("64k", 1, 65536),
        ("7B", 1, 7),
        (0, 1, 0),
    ],
)
def test_sizes(value: Any, plain_unit: int, expected: int) -> None:
    assert parse_size_bytes(value, plain_unit) == expected


@pytest.mark.parametrize(
    "value", ["", "GiB", "4 lumps", "-1", -1, True, None, [1], float("nan"), float("inf"), "1.5 B"]
)
def test_not_sizes(value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a size|unknown unit|whole number"):
        parse_size_bytes(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(30, 30), ("30 s", 30_000), ("2min", 120_000), ("0.1 ms", 1), ("1h", 3600_000)],
)
def test_times(value: Any, expected: int) -> None:
    assert parse_time_ms(value) == expected


@given(st.integers(min_value=0, max_value=1 << 50))
def test_formatted_size_reads_back_nearly(nbytes: int) -> None:
    back = float(format_size(nbytes).split()[0])
    unit = parse_size_bytes("1 " + format_size(nbytes).split()[1])
    assert abs(back * unit - nbytes) <= nbytes * 1e-3


class Units(Options):
    wait_sec: SecondsAsMs = Field(30_000, description="x")
    size_gb: GibAsBytes = Field(GIB, description="x")
    limit_gb: GibAsBytes = Field(0, description="x")
    time_ms: Milliseconds = Field(1500, description="x")
    name: str | None = Field(None, description="x")


def test_defaults_hold_the_models_units_and_given_values_the_operators() -> None:
    """A default of 30_000 ms must not be taken for 30_000 s."""
    default, given = Units(), Units.model_validate({"wait_sec": 30, "size_gb": 1, "time_ms": 1500})
    assert (default.wait_sec, default.size_gb, default.time_ms) == (30_000, GIB, 1500)
    assert given == default
    shown = [display(info, getattr(default, key)) for key, info in Units.model_fields.items()]
    assert shown == ["30 s", "1 GiB", "0 B", "1500 ms", "-"]


def test_machine_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    assert Machine.measure(tmp_path).available_memory_bytes == 512 << 20
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1\n")
    assert Machine.measure(tmp_path).total_memory_bytes == 1 << 30
    (cgroup / "memory.max").write_text(f"{256 << 20}\n")
    (cgroup / "memory.current").write_text(f"{200 << 20}\n")
    measured = Machine.measure(tmp_path)
    assert measured.total_memory_bytes == 256 << 20
    assert measured.available_memory_bytes == 56 << 20


def test_free_bytes_of_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") == free_bytes(tmp_path) > 0
