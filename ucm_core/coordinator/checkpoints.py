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
    vectorised search over 64-bit words of the links, then a full comparison of the few that match.
    """

    def __init__(self, row: GroupSpec, grain: int, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.row = row
        self.grain = grain
        self.forgotten = 0
        self._lock = threading.Lock()
        self._slots: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._words: npt.NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self._free = list(range(capacity - 1, -1, -1))
        self._sorted: npt.NDArray[np.uint64] | None = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, position: int, link: bytes) -> None:
        """A snapshot at ``position`` of the prefix that ends in ``link`` (32 bytes) is stored.

        Positions off the grain are refused (ValueError): their tail is not part of a chain.
        """
        if position <= 0 or position % self.grain:
            raise ValueError(f"position {position} is not on the grain of {self.grain} tokens")
        with self._lock:
            if (position, link) in self._slots:
                self._slots.move_to_end((position, link))
                return
            if not self._free:
                self._free.append(self._slots.popitem(last=False)[1])
                self.forgotten += 1
            slot = self._free.pop()
            self._slots[position, link] = slot
            self._words[slot] = int.from_bytes(link[:8], "little")
            self._sorted = None

    def discard(self, position: int, link: bytes) -> None:
        """A get missed: the snapshot is gone. Unknown entries are fine."""
        with self._lock:
            slot = self._slots.pop((position, link), None)
            if slot is not None:
                self._free.append(slot)
                self._sorted = None

    def positions(self, chain: ContentChain) -> Positions:
        """Ascending positions known for this very prefix; marks them as used."""
        links = chain.links
        with self._lock:
            known = self._index()
            if not len(known) or not len(links):
                return np.empty(0, np.int64)
            words = np.ascontiguousarray(links[:, :8]).view("<u8")[:, 0]
            at = np.minimum(np.searchsorted(known, words), len(known) - 1)
            found = []
            for i in np.flatnonzero(known[at] == words):
                key = ((int(i) + 1) * self.grain, links[i].tobytes())
                if key in self._slots:
                    self._slots.move_to_end(key)
                    found.append(key[0])
        return np.array(found, np.int64)

    def _index(self) -> npt.NDArray[np.uint64]:
        if self._sorted is None:
            used = np.fromiter(self._slots.values(), np.int64, len(self._slots))
            self._sorted = np.sort(self._words[used])
        return self._sorted
