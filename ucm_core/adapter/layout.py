"""Layout descriptors: in which order the bytes of an object lie.

An object is engine-native bytes of one group at one coordinate. Its logical dimensions are ``layer``,
``kv`` (K, V), ``token`` (entries of a block), ``head`` and ``elem`` (elements of a head). A descriptor
lists *axes*, outermost first; a dimension may be split over several axes, each with the number of
logical steps that one index of it takes. Text form::

    bf16|token:4@16,kv:2,token:16,head:8,elem:64

is four pages of 16 tokens, each K then V, token-major. A dimension that is not named has size 1. The
id of an object excludes its layout; a reader with another layout converts (``copy_plan``).

Bytes whose inner order is not described (packed recurrent states, fp8 entries with their scales) have
the element type ``opaque.<tag>``, one byte each: they convert to nothing but themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final

DIMS: Final = ("layer", "kv", "token", "head", "elem")

#: Bytes of an element by canonical type name.
ITEM_BYTES: Final = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

_AXIS = re.compile(r"([a-z]+):([1-9][0-9]*)(?:@([1-9][0-9]*))?")
_OPAQUE = re.compile(r"opaque\.[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: ``size`` indices of ``dim``, each ``step`` logical units apart."""

    dim: str
    size: int
    step: int = 1

    def __str__(self) -> str:
        return f"{self.dim}:{self.size}" + (f"@{self.step}" if self.step != 1 else "")


@dataclass(frozen=True, slots=True)
class LayoutDescriptor:
    """``dtype`` and axes, outermost first, densely packed. Two descriptors of the same order are equal:
    axes of size 1 are dropped and neighbours that are one axis are joined.

    Raises ValueError for an unknown type or dimension, or axes of a dimension that do not cover it.
    """

    dtype: str
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES and not _OPAQUE.fullmatch(self.dtype):
            raise ValueError(
                f"layout: unknown element type {self.dtype!r}; known are "
                f"{', '.join(ITEM_BYTES)} and opaque.<tag>"
            )
        axes = _joined(self.axes)
        for axis in axes:
            if axis.dim not in DIMS:
                raise ValueError(f"layout: unknown dimension {axis.dim!r}; known are {DIMS}")
            if axis.size < 1 or axis.step < 1:
                raise ValueError(f"layout: size and step of axis {axis} must be at least 1")
        for dim in DIMS:
            _check_covered(dim, axes)
        object.__setattr__(self, "axes", axes)

    @classmethod
    def parse(cls, text: str) -> LayoutDescriptor:
        """The descriptor that ``str()`` wrote (or an equal spelling of it). Raises ValueError."""
        dtype, bar, rest = text.partition("|")
        if not bar:
            raise ValueError(f"layout {text!r}: expected '<type>|<axis>,...'")
        axes = []
        for word in rest.split(",") if rest else []:
            found = _AXIS.fullmatch(word)
            if found is None:
                raise ValueError(
                    f"layout {text!r}: axis {word!r} is not 'dim:size' or 'dim:size@step'"
                )
            dim, size, step = found.groups()
            axes.append(Axis(dim, int(size), int(step or 1)))
        return cls(dtype, tuple(axes))

    def __str__(self) -> str:
        return f"{self.dtype}|{','.join(map(str, self.axes))}"

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES.get(self.dtype, 1)

    @property
    def total_bytes(self) -> int:
        return self.item_bytes * prod(axis.size for axis in self.axes)

    def total(self, dim: str) -> int:
        """Size of a logical dimension."""
        return prod(axis.size for axis in self.axes if axis.dim == dim)

    @property
    def shard_count(self) -> int:
        """One shard a layer when layers lie outermost, else the object is one shard."""
        outer = self.axes[0] if self.axes else None
        if outer is None or outer.dim != "layer" or outer.size != self.total("layer"):
            return 1
        return outer.size

    @property
    def shard_bytes(self) -> int:
        return self.total_bytes // self.shard_count

    def byte_strides(self, shard_align: int = 1) -> tuple[int, ...]:
        """Bytes between neighbours along each axis, with shards padded to ``shard_align``."""
        strides: list[int] = []
        stride = self.item_bytes
        for i, axis in reversed(list(enumerate(self.axes))):
            if i == 0 and self.shard_count > 1:
                stride = -(-stride // shard_align) * shard_align
            strides.append(stride)
            stride *= axis.size
        return tuple(reversed(strides))


def _joined(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Without axes of size 1, and with ``token:4@16,token:16`` written as ``token:64``."""
    out: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if out and out[-1].dim == axis.dim and out[-1].step == axis.step * axis.size:
            out[-1] = Axis(axis.dim, out[-1].size * axis.size, axis.step)
        else:
            out.append(axis)
    return tuple(out)


def _check_covered(dim: str, axes: Iterable[Axis]) -> None:
    """The axes of a dimension are its digits: each step is the product of the smaller ones' sizes."""
    expected = 1
    for axis in sorted((a for a in axes if a.dim == dim), key=lambda a: a.step):
        if axis.step != expected:
            raise ValueError(
                f"layout: axis {axis} should step by {expected}; the axes of {dim!r} must count each "
                "of its indices exactly once"
            )
        expected *= axis.size
