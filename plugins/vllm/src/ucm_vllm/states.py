"""Recurrent states: what vLLM's spec says of them, and which of its blocks is a state worth keeping.

A state is known by its position in a prefix, not by a place in a block list: that list also has null
places, the running state and scratch of speculation. vLLM names the finished states of a step itself
(request -> group, block, tokens); only those are saved, in that very step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.blocks import NO_PAGE
from ucm_core.adapter.layout import LayoutDescriptor
from ucm_core.adapter.states import NULL_BLOCK
from ucm_core.errors import UnsupportedError
from ucm_core.identity import ContentChain
from ucm_vllm.messages import RowBlocks
from ucm_vllm.row_blocks import Tables, row_links

if TYPE_CHECKING:
    import torch

    from ucm_vllm.placement import StatePlace

#: Exact names of vLLM's spec classes that are states.
STATE_SPECS = frozenset({"MambaSpec"})
#: Positions at which one lookup asks for states; of a longer prompt the early ones are thinned out.
POSITIONS_ASKED = 1024

#: What vLLM says of one request in one step: (group, block id, tokens) of each finished state.
Offers = Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class StateKind:
    """Layers whose states look alike. ``engine_block``: tokens between positions at which vLLM can keep
    one. ``nbytes``: of one state in one layer on one rank, without padding. ``tag``: what those bytes
    are. ``ranks``: tensor-parallel ranks that hold a part each.
    """

    engine_block: int
    nbytes: int
    tag: str
    ranks: int = 1

    def layout(self, layers: int) -> LayoutDescriptor:
        """Whole states, layer after layer: nothing inside them can be cut or reordered."""
        axes = f"layer:{layers},elem:{self.nbytes}"
        return LayoutDescriptor.parse(f"opaque.state.{self.tag}|{axes}")


def state_kind(spec: Any, device: str, ranks: int = 1) -> StateKind:
    """The kind of a state group. ``device``: its kernels define the order inside a state. ``spec`` is
    that of one of ``ranks`` tensor-parallel ranks."""
    parts = [
        f"{str(dtype).removeprefix('torch.')}-{'x'.join(map(str, shape))}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    family = str(getattr(spec.mamba_type, "name", spec.mamba_type)).lower()
    return StateKind(
        engine_block=spec.block_size,
        nbytes=spec.state_content_size_bytes,
        tag=".".join([device, family, *parts]),
        ranks=ranks,
    )


def state_problems(spec: Any) -> list[str]:
    """Why a group of states cannot be kept."""
    problems = []
    mode = spec.mamba_cache_mode
    if mode != "align":
        problems.append(
            f"recurrent states with mamba_cache_mode={mode!r}: vLLM keeps no state at a block boundary "
            "then; start it with --enable-prefix-caching and --mamba-cache-mode align"
        )
    return problems


def check_state_tensors(tensors: Sequence[torch.Tensor], kind: StateKind, blocks: int) -> int:
    """Compare the real tensors with what the spec promised; returns the stride of a block in bytes.

    A layer has one tensor of bytes whose blocks are dense: its states packed one after the other. What
    lies between two blocks (padding, other layers) is not ours.
    """
    strides: set[int] = set()
    for tensor in tensors:
        block = tensor[:1]
        dense = block.is_contiguous() and block.numel() * tensor.element_size() == kind.nbytes
        if not dense or tensor.shape[0] != blocks:
            raise UnsupportedError(
                f"a state tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} and type "
                f"{tensor.dtype} does not match {blocks} blocks of packed states of {kind.nbytes} bytes"
            )
        strides.add(tensor.stride(0) * tensor.element_size())
    if len(strides) != 1:
        raise UnsupportedError(f"layers differ in block stride ({sorted(strides)} bytes)")
    return strides.pop()


def asked_positions(tokens: int, step: int) -> npt.NDArray[np.int64]:
    """Where to ask for states of a prompt of ``tokens`` tokens: multiples of ``step``, its end included.

    The deepest half of POSITIONS_ASKED one by one, of what lies before every second, fourth, ...
    """
    found = np.arange(step, tokens + 1, step, dtype=np.int64)
    half = POSITIONS_ASKED // 2
    early, deep = found[:-half], found[-half:]
    stride = step * max(1, math.ceil(len(early) / half))
    return np.concatenate([early[early % stride == 0], deep])


def as_blocks(
    place: StatePlace, positions: npt.NDArray[np.int64], tokens: int
) -> npt.NDArray[np.bool_]:
    """``bool[N]``: per block of the row, whether there is a state at its end."""
    size = place.row.block_tokens
    there = np.zeros(tokens // size, dtype=bool)
    there[positions // size - 1] = True
    return there


def as_positions(place: StatePlace, there: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Ascending positions: the inverse of :func:`as_blocks`."""
    positions: npt.NDArray[np.int64] = (np.flatnonzero(there) + 1) * place.row.block_tokens
    return positions


def offered_states(place: StatePlace, offers: Offers) -> dict[int, list[int]]:
    """Position -> vLLM's block in each of the row's groups, of states that every group offers.

    Positions off the row's grid are of no use: nobody would ask for them.
    """
    by_position: dict[int, dict[int, int]] = {}
    for group, block, tokens in offers:
        if group in place.tables and tokens % place.row.block_tokens == 0 and block != NULL_BLOCK:
            by_position.setdefault(tokens, {})[group] = block
    return {
        position: [found[table] for table in place.tables]
        for position, found in sorted(by_position.items())
        if position > 0 and len(found) == len(place.tables)
    }


def states_to_save(
    place: StatePlace, chain: ContentChain, states: Mapping[int, Sequence[int]]
) -> RowBlocks:
    """These states as blocks of the row. The chain must reach the last position."""
    blocks = np.array(list(states), dtype=np.int64) // place.row.block_tokens - 1
    pages = np.array(list(states.values()), dtype=np.int32).reshape(
        len(blocks), len(place.tables), 1
    )
    return RowBlocks(place.index, row_links(place, chain)[blocks], blocks, pages)


def state_to_load(
    place: StatePlace, chain: ContentChain, tables: Tables, position: int
) -> RowBlocks:
    """The state at ``position`` and the blocks that vLLM continues from; NO_PAGE where it gave none."""
    blocks = np.array([position // place.row.block_tokens - 1], dtype=np.int64)
    column = position // place.kind.engine_block - 1
    ids = [tables[n][column] if column < len(tables[n]) else NULL_BLOCK for n in place.tables]
    pages = np.array(ids, dtype=np.int32).reshape(1, len(ids), 1)
    pages[pages == NULL_BLOCK] = NO_PAGE
    return RowBlocks(place.index, row_links(place, chain)[blocks], blocks, pages)
