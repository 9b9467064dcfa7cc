"""The content chain of one request: engine-neutral, incremental, hashed natively.

``c_i = SHA-256(c_{i-1} || tokens_i)``, one link per ``block_tokens`` tokens; ids as u32 LE, or ``0xff``
and u64 LE for a block that holds an id over 2**32-1. Byte formats: ``native/include/ucm/hash.h``.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ucm_core import _native
from ucm_core.identity.extras import DIGEST_BYTES, ChainExtra, link_digest

ID_BYTES = 16

Links = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.uint32] | npt.NDArray[np.uint64] | npt.NDArray[np.int64]

_NO_TOKENS: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
_NO_LINKS: Links = np.empty((0, DIGEST_BYTES), np.uint8)
_MIN_CAPACITY = 16


def _checked(tokens: Tokens) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint64]:
    """``tokens`` as the native side takes them; nothing is copied or cast."""
    if not isinstance(tokens, np.ndarray):
        raise TypeError(f"tokens must be a numpy array, got {type(tokens).__name__}")
    if tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise TypeError(
            f"tokens must be one contiguous dimension, got shape {tokens.shape}, "
            f"strides {tokens.strides}"
        )
    if tokens.dtype == np.uint32:
        return tokens.view(np.uint32)
    if tokens.dtype == np.uint64:
        return tokens.view(np.uint64)
    if tokens.dtype == np.int64:
        if tokens.size and int(tokens.min()) < 0:
            raise ValueError(
                f"token id {int(tokens.min())} is negative: placeholders have no identity, give "
                "the item's digest with add_extra and its placeholder id"
            )
        return tokens.view(np.uint64)
    raise TypeError(f"tokens must be uint32, uint64 or int64, got {tokens.dtype}")


def object_ids(seed: bytes, links: Links) -> Ids:
    """``uint8[N, 16]``: ids of the objects that end at ``links[N, 32]`` (rows may be strided), for the
    coordinate that ``seed`` (32 bytes) stands for."""
    ids: Ids = np.empty((len(links), ID_BYTES), np.uint8)
    if len(links):
        _native.hash.object_ids(seed, links, ids)
    return ids


class ContentChain:
    """Links of one growing prompt. Owned by one request, not thread-safe.

    ``block_tokens``: the grain, from the namespace. ``root``: ``chain_root(...)``. ``extras``: known
    multimodal items and embeddings, see :meth:`add_extra`.
    """

    __slots__ = ("_buffer", "_count", "_extras", "_pending", "block_tokens", "root")

    def __init__(
        self, block_tokens: int, root: bytes = b"", extras: Iterable[ChainExtra] = ()
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        if len(root) not in (0, DIGEST_BYTES):
            raise ValueError(f"root must be empty or 32 bytes, got {len(root)}")
        self.block_tokens = block_tokens
        self.root = root
        self._buffer = _NO_LINKS
        self._count = 0
        self._pending = _NO_TOKENS
        self._extras: list[ChainExtra] = []
        for extra in extras:
            self.add_extra(extra)

    def __len__(self) -> int:
        """Number of complete links."""
        return self._count

    @property
    def tokens(self) -> int:
        """Tokens given so far, those of an incomplete block included."""
        return self._count * self.block_tokens + len(self._pending)

    @property
    def links(self) -> Links:
        """``uint8[len(self), 32]``, read-only view; row i ends at token ``(i + 1) * block_tokens``."""
        view = self._buffer[: self._count]
        view.flags.writeable = False
        return view

    @property
    def last(self) -> bytes:
        """The last complete link, or the root."""
        return self._buffer[self._count - 1].tobytes() if self._count else self.root

    def add_extra(self, extra: ChainExtra) -> None:
        """Mix ``extra`` into the link that holds its first token.

        Raises ValueError when that link was hashed already: its ids may have been used.
        """
        hashed = self._count * self.block_tokens
        if extra.position < hashed:
            raise ValueError(
                f"extra {extra.kind!r} starts at token {extra.position}, but tokens up to {hashed} "
                "are hashed; add extras before the tokens they affect"
            )
        bisect.insort(self._extras, extra, key=lambda e: e.position)

    def extend(self, tokens: Tokens) -> int:
        """Append ``tokens`` (1-d, contiguous, uint32 / uint64 / int64); returns the number of links.

        Only new links are hashed, in one native call without the GIL; a tail shorter than a block
        is kept. Raises TypeError for another dtype or layout, ValueError for a negative id.
        """
        new = _checked(tokens)
        total = len(self._pending) + len(new)
        made, left = divmod(total, self.block_tokens)
        if made:
            self._reserve(self._count + made)
            out = self._buffer[self._count : self._count + made]
            at, digests = self._extra_digests(self._count, made)
            self._hash(self.last, self._pending, new, self.block_tokens, at, digests, out)
            self._count += made
            self._pending = new[len(new) - left :].astype(np.uint64)
        elif len(new):
            self._pending = np.concatenate([self._pending, new.astype(np.uint64)])
        return self._count

    def object_ids(
        self, seed: bytes, start: int = 0, stop: int | None = None, *, links_per_block: int = 1
    ) -> Ids:
        """``uint8[k, 16]``: ids of blocks ``start .. stop`` of a group with this seed.

        ``links_per_block``: the group's block in grains; block i ends at link
        ``(i + 1) * links_per_block - 1``. ``stop`` defaults to the last whole block.
        """
        blocks = self._count // links_per_block
        stop = blocks if stop is None else stop
        if not 0 <= start <= stop <= blocks:
            raise IndexError(f"blocks [{start}, {stop}) are not within the {blocks} whole blocks")
        ends = self._buffer[: stop * links_per_block]
        return object_ids(seed, ends[(start + 1) * links_per_block - 1 :: links_per_block])

    def tail_link(self, length: int | None = None) -> bytes:
        """Link over the first ``length`` (default: all) tokens after the last complete block.

        It names a snapshot position off the grain; with ``length`` 0 it is :attr:`last`.
        """
        length = len(self._pending) if length is None else length
        if not 0 <= length <= len(self._pending):
            raise ValueError(f"{length} tail tokens asked for, {len(self._pending)} are there")
        if length == 0:
            return self.last
        out: Links = np.empty((1, DIGEST_BYTES), np.uint8)
        begin = self._count * self.block_tokens
        at, digests = self._digests_between(begin, begin + length)
        self._hash(self.last, self._pending[:length], _NO_TOKENS, length, at, digests, out)
        return out.tobytes()

    def snapshot_ids(self, seed: bytes, positions: Sequence[int] | npt.NDArray[np.uint64]) -> Ids:
        """``uint8[k, 16]``: snapshot ids at ``positions`` (tokens, each > 0).

        A position is on the grain, or within the tail after the last complete block.
        """
        where = np.ascontiguousarray(positions, np.uint64)
        ids: Ids = np.empty((len(where), ID_BYTES), np.uint8)
        if not len(where):
            return ids
        ends, off = np.divmod(where, np.uint64(self.block_tokens))
        bad = (where == 0) | np.where(off == 0, ends > self._count, ends != self._count)
        bad |= where > self.tokens
        if bad.any():
            raise IndexError(
                f"snapshot position {int(where[bad][0])} is neither on the grain of "
                f"{self.block_tokens} tokens nor in the tail after token "
                f"{self._count * self.block_tokens} ({self.tokens} tokens are known)"
            )
        rows: Links = np.empty((len(where), DIGEST_BYTES), np.uint8)
        on_grain = off == 0
        rows[on_grain] = self._buffer[ends[on_grain].astype(np.int64) - 1]
        for i in np.flatnonzero(~on_grain):  # a handful at most: positions inside one tail
            rows[i] = np.frombuffer(self.tail_link(int(off[i])), np.uint8)
        _native.hash.snapshot_ids(seed, rows, where, ids)
        return ids

    def _reserve(self, links: int) -> None:
        """Room for ``links`` rows. A view handed out earlier keeps its (unchanged) old buffer."""
        if links > len(self._buffer):
            grown: Links = np.empty(
                (max(links, 2 * len(self._buffer), _MIN_CAPACITY), DIGEST_BYTES), np.uint8
            )
            grown[: self._count] = self._buffer[: self._count]
            self._buffer = grown

    def _extra_digests(self, first: int, count: int) -> tuple[npt.NDArray[np.uint64], Links]:
        """Per link of ``[first, first + count)`` that has items: its index in the call, its digest."""
        if not self._extras:
            return _NO_TOKENS, _NO_LINKS
        by_link: dict[int, list[ChainExtra]] = {}
        for extra in self._within(first * self.block_tokens, (first + count) * self.block_tokens):
            by_link.setdefault(extra.position // self.block_tokens - first, []).append(extra)
        return _as_arrays({link: link_digest(items) for link, items in by_link.items()})

    def _digests_between(self, begin: int, end: int) -> tuple[npt.NDArray[np.uint64], Links]:
        items = self._within(begin, end)
        return _as_arrays({0: link_digest(items)} if items else {})

    def _within(self, begin: int, end: int) -> list[ChainExtra]:
        lo = bisect.bisect_left(self._extras, begin, key=lambda e: e.position)
        hi = bisect.bisect_left(self._extras, end, key=lambda e: e.position)
        return self._extras[lo:hi]

    @staticmethod
    def _hash(
        previous: bytes,
        pending: npt.NDArray[np.uint64],
        tokens: npt.NDArray[np.uint32] | npt.NDArray[np.uint64],
        block: int,
        at: npt.NDArray[np.uint64],
        digests: Links,
        out: Links,
    ) -> None:
        if tokens.dtype == np.uint32:
            narrow = tokens.view(np.uint32)
            _native.hash.extend_chain_u32(previous, pending, narrow, block, at, digests, out)
        else:
            wide = tokens.view(np.uint64)
            _native.hash.extend_chain_u64(previous, pending, wide, block, at, digests, out)


def _as_arrays(digests: dict[int, bytes]) -> tuple[npt.NDArray[np.uint64], Links]:
    if not digests:
        return _NO_TOKENS, _NO_LINKS
    links = sorted(digests)
    rows = np.frombuffer(b"".join(digests[i] for i in links), np.uint8)
    return np.array(links, np.uint64), rows.reshape(-1, DIGEST_BYTES)
