"""Between two layouts of one object: can it be done, and by which strided copies.

A plan is data. The native copier runs it after the checksum was verified and before anything reaches
an engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.adapter.layout import DIMS, LayoutDescriptor
from ucm_core.errors import UnsupportedError

#: What the native copier takes (ConvertPlan::kMaxDims). Layouts of real engines need up to six.
MAX_LOOPS = 8

_FROM_START: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """A loop nest, outermost first: for each index of ``shape`` copy ``run_bytes`` bytes from
    ``source_offset + index . source_strides`` to ``target_offset + index . target_strides``.

    Loops run in the target's order (writes ascend), and are merged as far as both sides allow.
    ``shape`` and strides are ``uint64[n]``; strides and offsets in bytes. ``n`` may be 0: one run.
    """

    shape: npt.NDArray[np.uint64]
    source_strides: npt.NDArray[np.uint64]
    target_strides: npt.NDArray[np.uint64]
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
    if len(loops) > MAX_LOOPS:
        raise UnsupportedError(
            f"from {source} to {target} takes {len(loops)} nested loops, at most {MAX_LOOPS} are run"
        )
    table = np.array(loops, np.uint64).reshape(len(loops), 3)
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


class Converter:
    """A plan bound to the sizes of its two regions. Immutable; any thread may run it.

    ``source_bytes`` / ``target_bytes``: what the arrays given to :meth:`run` hold at least. Raises
    UnsupportedError for a plan that the native copier does not take (reaches outside, overlaps,
    more than eight loops).
    """

    __slots__ = ("_native",)

    def __init__(self, plan: CopyPlan, source_bytes: int, target_bytes: int) -> None:
        try:
            self._native = _native.Converter.make(
                plan.shape,
                plan.source_strides,
                plan.target_strides,
                plan.run_bytes,
                plan.source_offset,
                plan.target_offset,
                source_bytes,
                target_bytes,
            )
        except ValueError as e:
            raise UnsupportedError(f"layout conversion refused: {e}") from e

    def run(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        """Fill ``target`` from ``source``, flat contiguous byte arrays that do not overlap; the GIL is
        released. Raises ValueError when one is too small, TypeError for another dtype or stride."""
        self._native.run(source, target)
