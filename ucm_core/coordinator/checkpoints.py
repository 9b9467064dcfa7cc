"""The checkpoint directory: which snapshots are known, so that only those are looked up.

An accelerator, never the truth: an entry may be stale (eviction notifies nobody) and a missing entry
may exist in the store. Without it (a restart, another machine) grid positions are asked instead
(``coordinator.lookup.grid_positions``), so reuse survives a cold directory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator.resolve import Positions
from ucm_core.identity import ContentChain
from ucm_core.spec.group import GroupSpec

DEFAULT_CAPACITY = 65_536


class CheckpointDirectory:
    """Known snapshots of one row, on the grain; filled by callbacks of finished puts. Thread-safe.

    Holds at most ``capacity`` entries; the least recently used leaves first and is counted in
    ``forgotten`` (the snapshot itself stays in the store). Membership of a whole chain is one
    vectorised search over 64-bit words of the links, then a full comparison of the few that match; an
    entry that comes or goes moves the sorted words by one place.
    """

    def __init__(self, row: GroupSpec, grain: int, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.row = row
        self.grain = grain
        self.capacity = capacity
        self.forgotten = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._words: npt.NDArray[np.uint64] = np.empty(0, np.uint64)  # ascending, one an entry

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, position: int, link: bytes) -> None:
        """A snapshot at ``position`` of the prefix that ends in ``link`` (32 bytes) is stored.

        Positions off the grain are refused (ValueError): their tail is not part of a chain.
        """
        if position <= 0 or position % self.grain:
            raise ValueError(f"position {position} is not on the grain of {self.grain} tokens")
        with self._lock:
            if (position, link) in self._entries:
                self._entries.move_to_end((position, link))
                return
            if len(self._entries) >= self.capacity:
                (_, gone), _ = self._entries.popitem(last=False)
                self._forget(gone)
                self.forgotten += 1
            self._entries[position, link] = None
            word = _word(link)
            self._words = np.insert(self._words, np.searchsorted(self._words, word), word)

    def discard(self, position: int, link: bytes) -> None:
        """A get missed: the snapshot is gone. Unknown entries are fine."""
        with self._lock:
            if (position, link) in self._entries:
                del self._entries[position, link]
                self._forget(link)

    def positions(self, chain: ContentChain) -> Positions:
        """Ascending positions known for this very prefix; marks them as used."""
        links = chain.links
        with self._lock:
            known = self._words
            if not len(known) or not len(links):
                return np.empty(0, np.int64)
            words = np.ascontiguousarray(links[:, :8]).view("<u8")[:, 0]
            at = np.minimum(np.searchsorted(known, words), len(known) - 1)
            found = []
            for i in np.flatnonzero(known[at] == words):
                key = ((int(i) + 1) * self.grain, links[i].tobytes())
                if key in self._entries:
                    self._entries.move_to_end(key)
                    found.append(key[0])
        return np.array(found, np.int64)

    def _forget(self, link: bytes) -> None:
        self._words = np.delete(self._words, np.searchsorted(self._words, _word(link)))


def _word(link: bytes) -> np.uint64:
    word: np.uint64 = np.uint64(int.from_bytes(link[:8], "little"))
    return word
