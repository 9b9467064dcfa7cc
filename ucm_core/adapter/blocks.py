"""Block-table arithmetic: from stored blocks of `block_tokens` to addresses in an engine's pages.

An engine keeps the KV of one layer in pages of ``engine_block`` tokens; its block table maps a
position to a page. A stored block is ours: it may cover several pages (gather), part of one (slice), or
neither be a multiple of the other (both). All cases are one formula over *pieces* of
``gcd(block_tokens, engine_block)`` tokens: a stored block is ``pieces`` runs, and a run lies in one page.

Everything is vectorised: a call costs a few numpy operations, whatever the number of blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core.errors import UnsupportedError
from ucm_core.store.contract import Addresses, RunShape

Table = npt.NDArray[np.int64]

#: In place of an engine block id: there is no memory for these tokens. An adapter maps what its engine
#: uses (a null block, -1) to this.
NO_PAGE = -1


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """How stored blocks lie on an engine's blocks. ``block_tokens`` and ``engine_block`` in tokens."""

    block_tokens: int
    engine_block: int

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.engine_block <= 0:
            raise ValueError(
                f"block_tokens {self.block_tokens} and engine_block {self.engine_block} must be positive"
            )

    @property
    def piece_tokens(self) -> int:
        """Tokens of one run: the largest unit that both grids share."""
        return math.gcd(self.block_tokens, self.engine_block)

    @property
    def pieces(self) -> int:
        """Runs of one stored block."""
        return self.block_tokens // self.piece_tokens

    def starts(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """``int64[N, pieces]``: first token of every piece of the stored blocks ``blocks[N]``."""
        offsets = np.arange(self.pieces, dtype=np.int64) * self.piece_tokens
        return blocks[:, None] * self.block_tokens + offsets

    def pages(
        self, table: Table, blocks: npt.NDArray[np.int64], end: int | None = None
    ) -> npt.NDArray[np.int64]:
        """``int64[N, pieces]``: the engine block id that holds each piece.

        ``table`` is the request's block table from its first token on. Pieces from token ``end`` on
        have no page (:data:`NO_PAGE`). A table too short for the rest is an error: the caller asked
        for tokens without memory.
        """
        starts = self.starts(blocks)
        columns = starts // self.engine_block
        if end is not None:
            columns[starts >= end] = 0
        if columns.size and int(columns.max()) >= len(table):
            raise ValueError(
                f"block table of {len(table)} entries does not reach stored block "
                f"{int(blocks.max())} (needs {int(columns.max()) + 1} blocks of "
                f"{self.engine_block} tokens)"
            )
        pages = table[columns]
        if end is not None:
            pages[starts >= end] = NO_PAGE
        return pages


@dataclass(frozen=True, slots=True)
class PageShape:
    """Strides, in bytes, inside one page of one layer: ``heads x tokens`` cells of ``cell_bytes``.

    ``opaque`` pages are packed by the engine across the tokens of a page (a kernel's own tiles): they
    can be cut between heads but never between tokens.
    """

    heads: int
    tokens: int
    cell_bytes: int
    head_stride: int
    token_stride: int
    opaque: bool = False

    def run(self, tokens: int, heads: tuple[int, int]) -> tuple[RunShape, int]:
        """The run of ``tokens`` consecutive tokens and heads ``[a, b)``, and the offset of head ``a``.

        Raises :class:`UnsupportedError` when the page cannot be cut that way, or when the cut is not
        a single strided run.
        """
        first, last = heads
        count = last - first
        if not 0 <= first < last <= self.heads or not 0 < tokens <= self.tokens:
            raise ValueError(f"{tokens} tokens of heads {heads} do not fit {self}")
        if self.opaque and tokens != self.tokens:
            raise UnsupportedError(
                f"pages of {self.tokens} tokens are packed by the engine's kernel and cannot be cut into "
                f"{tokens} tokens: set block_tokens to a multiple of {self.tokens}"
            )
        offset = first * self.head_stride
        cell = self.cell_bytes
        if self.token_stride == cell and self.head_stride == self.tokens * cell:  # head-major
            if tokens == self.tokens or count == 1:
                return RunShape(count * tokens * cell), offset
            return RunShape(tokens * cell, count, self.head_stride), offset
        if self.head_stride == cell and self.token_stride == self.heads * cell:  # token-major
            if count == self.heads or tokens == 1:
                return RunShape(tokens * count * cell), offset
            return RunShape(count * cell, tokens, self.token_stride), offset
        if count == 1:
            return RunShape(cell, tokens, self.token_stride), offset
        raise UnsupportedError(f"page strides of {self} are neither head-major nor token-major")


@dataclass(frozen=True, slots=True)
class PieceRuns:
    """How one piece of a page (consecutive tokens) lies in engine memory, in the order it is stored.

    Run ``j`` has the shape ``shapes[j % len(shapes)]`` and begins ``offsets[j] + first token of the piece
    in its page * token_strides[j]`` bytes into the page.
    """

    shapes: tuple[RunShape, ...]
    offsets: tuple[int, ...]
    token_strides: tuple[int, ...]

    @classmethod
    def single(cls, run: RunShape, offset: int, token_stride: int) -> PieceRuns:
        return cls((run,), (offset,), (token_stride,))

    @property
    def count(self) -> int:
        """Runs of a piece."""
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of a piece."""
        turns = self.count // len(self.shapes)
        return turns * sum(run.nbytes * run.count for run in self.shapes)


@dataclass(frozen=True, slots=True)
class PageMap:
    """Addresses of one rank's pages: ``bases[layer] + block id * block_stride + place in the page``.

    ``bases`` is ``uint64[layers]`` in shard order, ``block_stride`` is bytes, ``runs`` says where in a
    page the heads stored lie. ``tables`` is ``int64[layers]``: which of the request's
    block tables each layer uses, where the engine keeps several (None: all the first). The map owns
    no memory: the engine keeps its tensors alive as long as the map is used.
    """

    grid: BlockGrid
    bases: npt.NDArray[np.uint64]
    block_stride: int
    runs: PieceRuns
    tables: npt.NDArray[np.int64] | None = None

    @property
    def layers(self) -> int:
        """Shards of one stored block."""
        return len(self.bases)

    @property
    def runs_per_shard(self) -> int:
        """Addresses of one shard."""
        return self.grid.pieces * self.runs.count

    def addresses(
        self,
        pages: npt.NDArray[np.integer[Any]],
        blocks: npt.NDArray[np.int64],
        begin: int = 0,
        end: int | None = None,
    ) -> Addresses:
        """``uint64[N * layers, pieces * runs]``: one row per shard, block-major.

        ``pages`` is what :meth:`BlockGrid.pages` says for ``blocks[N]``: ``[N, pieces]``, or
        ``[N, tables, pieces]`` with several block tables. Pieces without a page, and those outside the
        tokens ``[begin, end)``, get address 0 (skip on load): below lie pages that others read
        already, above what the engine computes itself.
        """
        starts = self.grid.starts(blocks)
        first = (starts % self.grid.engine_block)[:, :, None]
        inside = first * np.array(self.runs.token_strides) + np.array(self.runs.offsets)
        count = pages.shape[1] if pages.ndim == 3 else 1
        by_table = pages.astype(np.int64).reshape(len(blocks), count, self.grid.pieces)
        begins = by_table[:, :, :, None] * self.block_stride + inside[:, None]
        relative = begins.astype(np.uint64)
        outside = starts < begin
        if end is not None:
            outside |= starts >= end
        skipped = (by_table < 0) | outside[:, None, :]
        if self.tables is not None:
            relative, skipped = relative[:, self.tables], skipped[:, self.tables]
        out = relative + self.bases[None, :, None, None]
        if skipped.any():
            out[np.broadcast_to(skipped[:, :, :, None], out.shape)] = 0
        rows = len(blocks) * self.layers
        return np.ascontiguousarray(out.reshape(rows, self.runs_per_shard))

    def shards(self, count: int) -> npt.NDArray[np.uint32]:
        """``uint32[count * layers]``: shard numbers of the rows of :meth:`addresses`."""
        return np.tile(np.arange(self.layers, dtype=np.uint32), count)
