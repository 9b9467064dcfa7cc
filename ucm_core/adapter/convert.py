"""Between two layouts of one object: can it be done, and by which strided copies.

A plan is data: the native copier runs it after the checksum was verified and before anything reaches
an engine. ``run_plan`` is its reference in numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.layout import DIMS, LayoutDescriptor
from ucm_core.errors import UnsupportedError

_FROM_START: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """A loop nest, outermost first: for each index of ``shape`` copy ``run_bytes`` bytes from
    ``source_offset + index . source_strides`` to ``target_offset + index . target_strides``.

    Loops run in the target's order (writes ascend), and are merged as far as both sides allow.
    ``shape`` and strides are ``int64[n]``; strides and offsets in bytes. ``n`` may be 0: one run.
    """

    shape: npt.NDArray[np.int64]
    source_strides: npt.NDArray[np.int64]
    target_strides: npt.NDArray[np.int64]
    run_bytes: int
    source_offset: int = 0
    target_offset: int = 0

    @property
    def runs(self) -> int:
        """Number of contiguous copies."""
        return int(np.prod(self.shape))

    @property
    def is_straight(self) -> bool:
        """True when it is one memory copy."""
        return not len(self.shape)


@dataclass(frozen=True, slots=True)
class _Digit:
    """``size`` indices of ``dim`` in logical steps of ``step``, ``stride`` bytes apart."""

    step: int
    size: int
    stride: int


def why_not(source: LayoutDescriptor, target: LayoutDescriptor) -> str | None:
    """None when ``source`` can be turned into ``target``, else the reason (it is then a miss)."""
    try:
        copy_plan(source, target)
    except UnsupportedError as e:
        return str(e)
    return None


def convertible(source: LayoutDescriptor, target: LayoutDescriptor) -> bool:
    """Same element type and dimensions, and splits that fit each other."""
    return why_not(source, target) is None


def copy_plan(
    source: LayoutDescriptor,
    target: LayoutDescriptor,
    *,
    source_align: int = 1,
    target_align: int = 1,
    source_begin: Mapping[str, int] = _FROM_START,
    target_begin: Mapping[str, int] = _FROM_START,
) -> CopyPlan:
    """The copies that fill ``target`` from ``source``.

    ``*_align``: shards of that side start at multiples of it (4096 inside stored objects).
    ``*_begin``: where one side is larger in a dimension, the part of it that takes part begins there
    (``{"head": 4}``: the reader has half of the stored heads). Raises UnsupportedError with the reason.
    """
    if source.dtype != target.dtype:
        raise UnsupportedError(f"elements differ: {source.dtype} is stored, {target.dtype} wanted")
    if source.dtype.startswith("opaque.") and source != target:
        raise UnsupportedError(f"{source.dtype} bytes have no described order to convert")
    source_offset = target_offset = 0
    pairs: list[tuple[_Digit, _Digit]] = []
    for dim in DIMS:
        size = _common_size(dim, source, target, source_begin, target_begin)
        ours, at = _cut(_digits(source, dim, source_align), size, source_begin.get(dim, 0), dim)
        source_offset += at
        theirs, at = _cut(_digits(target, dim, target_align), size, target_begin.get(dim, 0), dim)
        target_offset += at
        pairs += _refined(ours, theirs, dim)
    loops = _merged(pairs)
    run = source.item_bytes
    if loops and loops[-1][1:] == (run, run):
        run *= loops.pop()[0]
    table = np.array(loops, np.int64).reshape(len(loops), 3)
    return CopyPlan(
        table[:, 0].copy(),
        table[:, 1].copy(),
        table[:, 2].copy(),
        run,
        source_offset,
        target_offset,
    )


def _common_size(
    dim: str,
    source: LayoutDescriptor,
    target: LayoutDescriptor,
    source_begin: Mapping[str, int],
    target_begin: Mapping[str, int],
) -> int:
    have, want = source.total(dim), target.total(dim)
    if have != want and dim not in source_begin and dim not in target_begin:
        raise UnsupportedError(f"{have} of {dim!r} are stored, {want} wanted")
    return min(have, want)


def _digits(layout: LayoutDescriptor, dim: str, align: int) -> list[_Digit]:
    """The axes of one dimension, smallest step first."""
    strides = layout.byte_strides(align)
    found = [
        _Digit(axis.step, axis.size, stride)
        for axis, stride in zip(layout.axes, strides, strict=True)
        if axis.dim == dim
    ]
    return sorted(found, key=lambda d: d.step)


def _cut(digits: list[_Digit], size: int, begin: int, dim: str) -> tuple[list[_Digit], int]:
    """The digits of indices ``[begin, begin + size)`` and the byte offset of the first."""
    total = digits[-1].step * digits[-1].size if digits else 1
    if size == total and begin == 0:
        return digits, 0
    if begin % size or begin + size > total:
        raise UnsupportedError(f"{dim!r} [{begin}, {begin + size}) is no whole part of {total}")
    kept: list[_Digit] = []
    offset = 0
    for d in digits:
        here = min(d.size, max(size // d.step, 1))
        # A part that begins at a multiple of its size lies within one turn of this digit only if
        # the digit is a whole number of parts.
        if (d.step < size and size % d.step) or d.size % here:
            raise UnsupportedError(f"{size} of {dim!r} do not fit the stored split by {d.step}")
        offset += begin // d.step % d.size * d.stride
        if here > 1:
            kept.append(_Digit(d.step, here, d.stride))
    return kept, offset


def _refined(ours: list[_Digit], theirs: list[_Digit], dim: str) -> list[tuple[_Digit, _Digit]]:
    """Both sides split at each other's steps, as pairs of equal step and size."""
    ends = {d.step for d in (*ours, *theirs)} | {d.step * d.size for d in (*ours, *theirs)}
    steps = sorted(ends)
    pairs = []
    for step, end in itertools.pairwise(steps):
        if end % step:
            raise UnsupportedError(
                f"splits of {dim!r} by {step} and by {end} do not fit each other"
            )
        pairs.append((_part(ours, step, end), _part(theirs, step, end)))
    return pairs


def _part(digits: list[_Digit], step: int, end: int) -> _Digit:
    whole = next(d for d in digits if d.step <= step < d.step * d.size)
    return _Digit(step, end // step, whole.stride * (step // whole.step))


def _merged(pairs: list[tuple[_Digit, _Digit]]) -> list[tuple[int, int, int]]:
    """(size, source stride, target stride), by falling target stride, joined where both sides are
    contiguous across the border."""
    loops: list[tuple[int, int, int]] = []
    for a, b in sorted(pairs, key=lambda p: -p[1].stride):
        if loops:
            size, source, target = loops[-1]
            if source == a.stride * a.size and target == b.stride * b.size:
                loops[-1] = (size * a.size, a.stride, b.stride)
                continue
        loops.append((a.size, a.stride, b.stride))
    return loops


def run_plan(plan: CopyPlan, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    """Carry out ``plan`` between two flat byte arrays. Raises ValueError when one is too small."""
    for what, flat, offset, strides in (
        ("source", source, plan.source_offset, plan.source_strides),
        ("target", target, plan.target_offset, plan.target_strides),
    ):
        need = offset + int(((plan.shape - 1) * strides).sum()) + plan.run_bytes
        if flat.ndim != 1 or flat.dtype != np.uint8 or flat.strides != (1,) or len(flat) < need:
            raise ValueError(
                f"{what} must be a flat contiguous uint8 array of {need} bytes or more"
            )
    shape = (*plan.shape.tolist(), plan.run_bytes)
    a = np.lib.stride_tricks.as_strided(
        source[plan.source_offset :], shape, (*plan.source_strides.tolist(), 1), writeable=False
    )
    b = np.lib.stride_tricks.as_strided(
        target[plan.target_offset :], shape, (*plan.target_strides.tolist(), 1)
    )
    b[...] = a
