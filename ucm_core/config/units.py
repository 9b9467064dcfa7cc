"""Sizes and times with units, and lists of directories, as option types.

A plain number keeps the unit that the option's name says (``_gb``: GiB, ``_ms``: milliseconds); a
string may name its own: ``cache_buffer_capacity_gb: 512 MiB``, ``timeout_ms: 30 s``. As in the
systems operators come from, "GB" in an option's name means GiB (2**30 bytes); so do all binary
looking units here, because a buffer that is 7 % smaller than asked for helps nobody.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic.fields import FieldInfo

GIB = 1 << 30

_SIZES = {
    "": 1,
    "b": 1,
    **dict.fromkeys(("k", "kb", "kib"), 1 << 10),
    **dict.fromkeys(("m", "mb", "mib"), 1 << 20),
    **dict.fromkeys(("g", "gb", "gib"), 1 << 30),
    **dict.fromkeys(("t", "tb", "tib"), 1 << 40),
}
_TIMES = {"ms": 1, "s": 1000, "sec": 1000, "min": 60_000, "m": 60_000, "h": 3_600_000}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size_bytes(value: Any, plain_unit: int = 1) -> int:
    """``value`` in bytes. A number without unit counts ``plain_unit`` bytes; raises ``ValueError``."""
    number, unit = _split(value, "a size such as 512 MiB or 4 GiB")
    if unit is None:
        return _whole(number * plain_unit)
    if unit not in _SIZES:
        raise ValueError(f"unknown unit in {value!r}; use KiB, MiB, GiB or TiB")
    return _whole(number * _SIZES[unit])


def parse_time_ms(value: Any, plain_unit_ms: int = 1) -> int:
    """``value`` in milliseconds, rounded up so that a time never becomes 0 unless it was 0."""
    number, unit = _split(value, "a time such as 500 ms, 30 s or 2 min")
    if unit is None:
        return math.ceil(number * plain_unit_ms)
    if unit not in _TIMES:
        raise ValueError(f"unknown unit in {value!r}; use ms, s, min or h")
    return math.ceil(number * _TIMES[unit])


def format_size(nbytes: int) -> str:
    """``1.5 GiB``: the largest unit that leaves at least 1."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def format_time(ms: int) -> str:
    """``30 s``: the largest unit that leaves a whole number."""
    for unit, size in (("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms and ms % size == 0:
            return f"{ms // size} {unit}"
    return f"{ms} ms"


def display(info: FieldInfo, value: Any) -> str:
    """A value of an option as an operator would write it; ``-`` when it is unset."""
    unit = plain_unit(info)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if unit in ("bytes", "GiB") and isinstance(value, int):
        return format_size(value)
    if unit in ("ms", "seconds") and isinstance(value, int):
        return format_time(value)
    if isinstance(value, tuple):
        return ":".join(str(item) for item in value)
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    return str(value)


def plain_unit(info: FieldInfo) -> str:
    """What a plain number of this option counts: bytes, GiB, ms, seconds, or "" for none of these."""
    for item in info.metadata:
        if isinstance(item, WithJsonSchema) and item.json_schema:
            return str(item.json_schema.get("x-plain-number", ""))
    return ""


def _split(value: Any, wanted: str) -> tuple[float, str | None]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected {wanted}, got {value!r}")
    if isinstance(value, int | float):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"expected {wanted}, got {value!r}")
        return float(value), None
    match = _NUMBER.fullmatch(value)
    if match is None:
        raise ValueError(f"expected {wanted}, got {value!r}")
    number, unit = match.groups()
    return float(number), unit.lower() or None


def _whole(nbytes: float) -> int:
    if nbytes != int(nbytes):
        raise ValueError(f"{nbytes} is not a whole number of bytes")
    return int(nbytes)


def _gib(value: Any) -> Any:
    return None if value is None else parse_size_bytes(value, GIB)


def _roots(value: Any) -> Any:
    parts = value.split(":") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(p, str | Path) for p in parts):
        raise ValueError(f"expected directories separated by ':', got {value!r}")
    roots = [str(part).strip() for part in parts]
    if not roots or not all(roots):
        raise ValueError(f"an empty directory name in {value!r}")
    expanded = [Path(root).expanduser() for root in roots]
    for path in expanded:
        if not path.is_absolute():
            raise ValueError(f"{str(path)!r} is relative; give an absolute path")
    if len({str(path) for path in expanded}) != len(expanded):
        raise ValueError(f"the same directory twice in {value!r}")
    return tuple(expanded)


def _number_or_text(unit: str, example: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}],
            "examples": [example],
            "x-plain-number": unit,
        }
    )


_DIRECTORIES = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
        ],
        "examples": ["/mnt/a:/mnt/b"],
    }
)

#: Bytes; a plain number is bytes.
Bytes = Annotated[
    int, BeforeValidator(parse_size_bytes), Field(ge=0), _number_or_text("bytes", "64 KiB")
]
#: For options named ``*_gb``: the value is held in BYTES, a plain number is GiB.
GibAsBytes = Annotated[int, BeforeValidator(_gib), Field(ge=0), _number_or_text("GiB", "512 MiB")]
#: For options named ``*_ms``.
Milliseconds = Annotated[
    int, BeforeValidator(parse_time_ms), Field(gt=0), _number_or_text("ms", "30 s")
]
#: For options named ``*_s``/``*_sec``: held in MILLISECONDS, a plain number is seconds.
SecondsAsMs = Annotated[
    int,
    BeforeValidator(lambda v: parse_time_ms(v, 1000)),
    Field(gt=0),
    _number_or_text("seconds", "2 min"),
]
#: One or more absolute directories, colon-separated text or a list; no duplicates.
Directories = Annotated[tuple[Path, ...], BeforeValidator(_roots), _DIRECTORIES]
