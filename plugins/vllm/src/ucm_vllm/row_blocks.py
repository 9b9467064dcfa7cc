"""Scheduler side: from a request's block tables to the stored blocks of each row and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.blocks import NO_PAGE
from ucm_core.identity import ContentChain
from ucm_vllm.keys import Prints, fingerprints
from ucm_vllm.messages import Links, RowBlocks

if TYPE_CHECKING:
    from ucm_vllm.placement import Place, RowPlace

#: vLLM's block tables of a request, one per KV cache group.
Tables = Sequence[list[int]]
#: vLLM's null block: no memory behind it. A window has left those tokens behind, or never had them.
_NULL = 0


def row_links(place: Place, chain: ContentChain) -> Links:
    """``uint8[N, 32]``: the links at which the row's whole blocks end."""
    per_block = place.row.block_tokens // chain.block_tokens
    return chain.links[per_block - 1 :: per_block]


def row_prints(place: Place, links: Links) -> Prints:
    """``uint64[N]`` of a row's ``links``; other rows have other prints for the same link."""
    prints: Prints = fingerprints(links) ^ np.uint64(place.salt)
    return prints


def part_prints(places: Sequence[Place], parts: Sequence[RowBlocks]) -> Prints:
    """Prints of an operation's blocks, in the order of their numbers."""
    return np.concatenate([row_prints(places[part.row], part.links) for part in parts])


def row_blocks(
    place: RowPlace,
    chain: ContentChain,
    blocks: npt.NDArray[np.int64],
    tables: Tables,
    end: int | None = None,
) -> RowBlocks:
    """Stored blocks ``blocks`` of a row with the pages that hold them; none from token ``end`` on."""
    links = row_links(place, chain)[blocks]
    return RowBlocks(place.index, links, blocks, _pages(place, blocks, tables, end))


def _pages(
    place: RowPlace, blocks: npt.NDArray[np.int64], tables: Tables, end: int | None
) -> npt.NDArray[np.int32]:
    pages = np.empty((len(blocks), len(place.tables), place.grid.pieces), dtype=np.int32)
    for column, number in enumerate(place.tables):
        table = np.asarray(tables[number], dtype=np.int64)
        pages[:, column] = place.grid.pages(table, blocks, end)
    pages[pages == _NULL] = NO_PAGE
    return pages


def to_load(place: RowPlace, part: RowBlocks, begin: int) -> RowBlocks:
    """Without blocks of which nothing is to be loaded: a window has no page for them, or the engine has
    them (tokens below ``begin``)."""
    wanted = (part.pages != NO_PAGE).any(axis=1) & (place.grid.starts(part.blocks) >= begin)
    rows = np.flatnonzero(wanted.any(axis=1))
    return part if len(rows) == len(part) else part.only(rows)


def to_save(part: RowBlocks) -> RowBlocks:
    """Without blocks that have no source somewhere: those are abandoned."""
    rows = np.flatnonzero((part.pages != NO_PAGE).all(axis=(1, 2)))
    return part if len(rows) == len(part) else part.only(rows)


def has_moved(place: RowPlace, part: RowBlocks, tables: Tables) -> bool:
    """True when some of the pages are no longer what the tables say."""
    last = int(part.blocks[-1]) + 1
    shortest = min(len(tables[number]) for number in place.tables)
    if shortest * place.grid.engine_block < last * place.grid.block_tokens:
        return True
    return not np.array_equal(_pages(place, part.blocks, tables, None), part.pages)
