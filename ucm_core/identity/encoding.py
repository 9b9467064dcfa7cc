"""The one canonical encoding behind every digest of the project.

Each value is a type byte and a length-prefixed body, so no two values share an encoding and no
encoding is a prefix of another; lengths and counts are unsigned 64-bit little-endian:

====================  =========================================================================
``None``              ``N``
``True``, ``False``   ``T``, ``F``
``int``               ``i`` length decimal digits (ASCII, ``-`` in front when negative)
``float``             ``f`` IEEE-754 binary64, little-endian; NaN refused, -0.0 written as 0.0
``str``               ``s`` length UTF-8, as given (no normalisation)
``bytes``             ``b`` length bytes
list, tuple           ``l`` count items
mapping (str keys)    ``d`` count (key as ``str``, value) ..., ascending by the UTF-8 of the key
====================  =========================================================================

So ``None``, an absent key and ``""`` are three different things, and ``1``, ``1.0`` and ``True`` too.
Never pickle, repr or JSON: those depend on interpreter, library or float formatting.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

#: What can be encoded. Anything else is a TypeError, never a fallback to its repr.
Encodable = (
    None | bool | int | float | str | bytes | Sequence["Encodable"] | Mapping[str, "Encodable"]
)


def _u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def _float(value: float, path: str) -> bytes:
    if math.isnan(value):
        raise ValueError(f"{path}: NaN has no canonical encoding")
    return b"f" + struct.pack("<d", value + 0.0)  # -0.0 + 0.0 == 0.0


def encode(value: Encodable, path: str = "value") -> bytes:
    """Canonical bytes of ``value``. ``path`` names it in errors (``rope.factor``, ``extra[2]``).

    Raises TypeError for a type outside the table and ValueError for NaN.
    """
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        digits = str(int(value)).encode()
        return b"i" + _u64(len(digits)) + digits
    if isinstance(value, float):
        return _float(value, path)
    if isinstance(value, str):
        text = str.encode(value, "utf-8")
        return b"s" + _u64(len(text)) + text
    if isinstance(value, bytes):
        return b"b" + _u64(len(value)) + value
    if isinstance(value, Mapping):
        return _mapping(value, path)
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return b"l" + _u64(len(items)) + b"".join(items)
    raise TypeError(
        f"{path}: {type(value).__name__} has no canonical encoding; use None, bool, int, float, "
        "str, bytes, list, tuple or a mapping with str keys"
    )


def _mapping(value: Mapping[str, Encodable], path: str) -> bytes:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{path}: key {key!r} is {type(key).__name__}, not str")
    parts = [b"d", _u64(len(value))]
    for key in sorted(value, key=lambda k: k.encode()):
        parts += [encode(key), encode(value[key], f"{path}.{key}")]
    return b"".join(parts)


def floats(value: Encodable) -> Encodable:
    """``value`` with every int replaced by the equal float.

    Rope tables of one model say ``10000`` in one file and ``10000.0`` in another.
    """
    if isinstance(value, bool) or value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, int):
        return float(value)
    if isinstance(value, Mapping):
        return {key: floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [floats(item) for item in value]
    return value
