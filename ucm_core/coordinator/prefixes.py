"""Which prefixes were asked for before: finds the boundary that a request shares with earlier ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ucm_core.identity import Links

_DEFAULT_BITS = 20


class PrefixSketch:
    """The links of past requests, as a table of ``2**bits`` 64-bit words (8 MiB by default).

    Every link has one place; a newer one takes it over. So memory is bounded and an old prefix is
    forgotten in time, which costs a checkpoint and never a wrong hit. Two links that share 64 bits
    (one pair in 10^9 at a million links) at worst place a checkpoint where nobody needs one. One
    table serves one scheduler thread; nothing is a Python loop over links.
    """

    def __init__(self, bits: int = _DEFAULT_BITS) -> None:
        if not 1 <= bits <= 28:
            raise ValueError(f"bits {bits} is not within 1 and 28")
        self._mask = np.uint64((1 << bits) - 1)
        self._words: npt.NDArray[np.uint64] = np.zeros(1 << bits, np.uint64)

    def shared(self, links: Links) -> int:
        """How many leading links of ``links`` (``uint8[N, 32]``) belong to a prefix seen before."""
        words = _words(links)
        known = self._words[words & self._mask] == words
        hits = np.flatnonzero(known)
        return int(hits[-1]) + 1 if len(hits) else 0

    def add(self, links: Links) -> None:
        """A request with this chain was seen."""
        words = _words(links)
        self._words[words & self._mask] = words


def _words(links: Links) -> npt.NDArray[np.uint64]:
    """The first eight bytes of each link; 0 is the empty place and stands for nothing."""
    words: npt.NDArray[np.uint64] = np.ascontiguousarray(links[:, :8]).view(np.uint64)[:, 0]
    nonzero: npt.NDArray[np.uint64] = np.maximum(words, np.uint64(1))
    return nonzero
