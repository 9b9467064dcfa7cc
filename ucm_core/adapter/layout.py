"""Layout descriptors: in which order the bytes of an object lie.

An object is engine-native bytes of one group at one coordinate. Its logical dimensions are ``layer``,
``kv`` (K, V), ``token`` (entries of a block), ``head`` and ``elem`` (elements of a head). A descriptor
lists *axes*, outermost first; a dimension may be split over several axes, each with the number of
logical steps that one index of it takes, and K and V may differ in their inner order::

    bf16|token:4@16,kv:2,token:16,head:8,elem:64
    fp32|layer:2,head:4,kv(elem:8,token:32;token:32,elem:8)

The first is four pages of 16 tokens, each K then V, token-major; in the second K is stored transposed
and V in rows. A dimension that is not named has size 1. The id of an object excludes its layout; a
reader with another layout converts (``convert.py``, and the stages natively while they read).

Bytes whose inner order is not described (packed recurrent states, fp8 entries with their scales) have
the element type ``opaque.<tag>``, one byte each: they convert to nothing but themselves.

:class:`LayoutDescriptor` is native (``native/include/ucm/layout.h``): ``parse(text)`` raises ValueError
that names the axis and what was expected, ``str()`` is the canonical text (equal orders are equal),
``dtype``, ``opaque``, ``item_bytes``, ``total_bytes``, ``total(dim, kv=0)``, ``shard_count`` (one a layer
when layers lie outermost, else 1) and ``shard_bytes`` say what it holds. Immutable, hashable.
"""

from __future__ import annotations

from typing import Final

from ucm_core._native import LayoutDescriptor

__all__ = ["DIMS", "ITEM_BYTES", "LayoutDescriptor"]

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
