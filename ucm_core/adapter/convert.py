"""Between two layouts of one object: can it be done, and doing it.

Stages convert natively while they read; this is the same planner for adapters, tools and tests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.errors import UnsupportedError


def why_not(source: LayoutDescriptor, target: LayoutDescriptor) -> str | None:
    """None when ``source`` can be turned into ``target``, else the reason (it is then a miss)."""
    try:
        Conversion(source, target)
    except UnsupportedError as e:
        return str(e)
    return None


class Conversion:
    """The strided copies that fill an object of layout ``target`` from one of layout ``source``.

    ``*_align``: shards of that side start at multiples of it (4096 inside stored objects). Raises
    UnsupportedError with the reason where it cannot be done. Immutable; any thread may run it.
    """

    __slots__ = ("_native",)

    def __init__(
        self,
        source: LayoutDescriptor,
        target: LayoutDescriptor,
        *,
        source_align: int = 1,
        target_align: int = 1,
    ) -> None:
        try:
            self._native = _native.Conversion.plan(source, target, source_align, target_align)
        except ValueError as e:
            raise UnsupportedError(str(e)) from e

    @property
    def is_straight(self) -> bool:
        """True when each shard of the target is one memory copy."""
        return self._native.straight

    @property
    def source_bytes(self) -> int:
        """Bytes of a whole source object, padding included."""
        return self._native.source_bytes

    @property
    def target_bytes(self) -> int:
        """Bytes of a whole target object, padding included."""
        return self._native.target_bytes

    def run(
        self,
        source: npt.NDArray[np.uint8],
        target: npt.NDArray[np.uint8],
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        """Fill shards ``[begin, end)`` of ``target`` from the whole object ``source``: flat contiguous
        byte arrays that do not overlap; the GIL is released. Raises ValueError when one is too small
        or the shards do not exist, TypeError for another dtype or stride."""
        shards = self._native.target_shards
        self._native.run(source, target, begin, shards if end is None else end)
