"""The engine's KV memory as it was registered, in one form for both interfaces.

V1 is one tensor ``[blocks, layers, K and V, heads * tokens * head size]``. V2 describes regions: the bytes
of page slot ``i`` of a region lie at ``base + stride * i``, and hold the buffers of (layer, role) one after
another. A page index belongs to one layer group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ucm_core.errors import UnsupportedError

#: Roles of V2 that are K, V, or the latent row of MLA; any other is kept beside them as it is.
KEY, VALUE = "key", "value"


@dataclass(frozen=True, slots=True)
class Side:
    """Buffers of one more role (block scales, an index), ``nbytes`` a page: ``bases`` by layer.
    ``replicated``: the same bytes on all tensor-parallel ranks."""

    role: str
    nbytes: int
    stride: int
    bases: tuple[int, ...]
    replicated: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one space of page numbers. ``bases``: address of K (or the latent row) in page 0 by
    layer, ``value_offset``: bytes from K to V (None: there is no V), ``nbytes``: bytes of one of them in
    a page, ``stride``: bytes between pages."""

    number: int
    layers: tuple[int, ...]
    window: int | None
    slots: int
    stride: int
    bases: tuple[int, ...]
    value_offset: int | None
    nbytes: int
    sides: tuple[Side, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """``tokens``: of a page, None where the registration does not say. ``dtype``: torch's name of the
    element type, None where it does not say. ``device``: torch's kind and index of where it lies."""

    groups: tuple[Group, ...]
    tokens: int | None
    dtype: str | None
    item_bytes: int | None
    device: tuple[str, int]
    keep: Any = field(default=None, compare=False)

    @property
    def whole_prompts(self) -> bool:
        """The engine allocates for the whole prompt at once (V1), so it takes all of what it is promised."""
        return self.tokens is None


def pool_of_tensor(tensor: Any) -> Pool:
    """V1's pool tensor."""
    shape = tuple(int(n) for n in tensor.shape)
    size = int(tensor.element_size())
    strides = [int(stride) * size for stride in tensor.stride()]
    if len(shape) != 4 or shape[2] not in (1, 2) or strides[3] != size:
        raise UnsupportedError(
            f"a KV pool of shape {shape} and strides {tuple(tensor.stride())}: expected [blocks, layers, "
            "1 or 2, elements] with adjacent elements"
        )
    base = int(tensor.data_ptr())
    group = Group(
        number=0,
        layers=tuple(range(shape[1])),
        window=None,
        slots=shape[0],
        stride=strides[0],
        bases=tuple(base + layer * strides[1] for layer in range(shape[1])),
        value_offset=strides[2] if shape[2] == 2 else None,
        nbytes=shape[3] * size,
    )
    device = (str(tensor.device.type), int(tensor.device.index or 0))
    return Pool((group,), None, str(tensor.dtype).removeprefix("torch."), size, device, tensor)


def pool_of_layout(layout: Any, device: tuple[str, int]) -> Pool:
    """V2's layout. Raises UnsupportedError naming what of it cannot be addressed."""
    groups = tuple(_group(group) for group in layout.groups)
    dtype = getattr(layout, "dtype", None)
    named = None if dtype is None else str(dtype).removeprefix("torch.")
    if named == "uint8":  # bytes: the element type is not said
        named = None
    return Pool(groups, int(layout.tokens_per_block), named, None, device, layout)


def _group(group: Any) -> Group:
    number = int(group.layer_group_id)
    layers = tuple(sorted(int(layer) for layer in group.layer_ids))
    found: dict[str, dict[int, tuple[int, int, int]]] = {}
    slots: set[int] = set()
    replicated: set[str] = set()
    for shared, regions in (
        (False, group.regions),
        (True, getattr(group, "replicated_regions", ())),
    ):
        for region in regions:
            slots.add(int(region.num_slots))
            for layer, role, place in _buffers(number, region):
                found.setdefault(role, {})[layer] = place
                if shared:
                    replicated.add(role)
    keys, values = found.pop(KEY, {}), found.pop(VALUE, {})
    if tuple(sorted(keys)) != layers or (values and sorted(values) != sorted(keys)):
        raise UnsupportedError(
            f"layer group {number} of layers {layers} has K of {sorted(keys)} and V of {sorted(values)}: "
            "expected both, or K alone, of every layer"
        )
    if KEY in replicated or VALUE in replicated:
        raise UnsupportedError(f"layer group {number}: replicated K or V is not supported")
    offsets = {values[layer][0] - keys[layer][0] for layer in layers} if values else {None}
    sizes = {place[1:] for place in (*keys.values(), *values.values())}
    if len(offsets) != 1 or len(sizes) != 1 or len(slots) != 1:
        raise UnsupportedError(
            f"layer group {number}: its layers differ in where V lies, in size or in number of pages "
            f"({sorted(map(str, offsets))}, {sorted(sizes)}, {sorted(slots)})"
        )
    ((nbytes, stride),) = sizes
    (offset,) = offsets
    window = getattr(group, "window_size", None)
    return Group(
        number=number,
        layers=layers,
        window=None if window is None else int(window),
        slots=slots.pop(),
        stride=stride,
        bases=tuple(keys[layer][0] for layer in layers),
        value_offset=offset,
        nbytes=nbytes,
        sides=tuple(
            _side(number, role, places, layers, role in replicated)
            for role, places in sorted(found.items())
        ),
    )


def _buffers(number: int, region: Any) -> list[tuple[int, str, tuple[int, int, int]]]:
    """(layer, role, (address in page 0, bytes, bytes between pages)) of every buffer of a region."""
    count = len(region.buffers)
    nbytes, rest = divmod(int(region.size), max(count, 1))
    if rest or any(int(getattr(buffer, "expansion", 1)) != 1 for buffer in region.buffers):
        raise UnsupportedError(
            f"layer group {number}: a region of {region.size} bytes holds {count} buffers of different size, "
            "or layers with pages of another number of tokens"
        )
    base, stride = int(region.base), int(region.stride)
    return [
        (int(buffer.layer_id), str(buffer.role), (base + at * nbytes, nbytes, stride))
        for at, buffer in enumerate(region.buffers)
    ]


def _side(
    number: int,
    role: str,
    places: dict[int, tuple[int, int, int]],
    layers: Sequence[int],
    replicated: bool,
) -> Side:
    sizes = {place[1:] for place in places.values()}
    if sorted(places) != list(layers) or len(sizes) != 1:
        raise UnsupportedError(
            f"layer group {number}: buffers {role!r} of layers {sorted(places)} and sizes {sorted(sizes)}: "
            "expected one of equal size for each of its layers"
        )
    ((nbytes, stride),) = sizes
    return Side(role, nbytes, stride, tuple(places[layer][0] for layer in layers), replicated)
