"""Which blocks lie in the arena: found by link, pinned while promised, given up longest unused first."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ucm_trtllm.messages import Links, Numbers


class Residents:
    """The slots of one row. One thread. A slot is free, being filled (taken), or holds a verified block;
    one that holds a block is given to another only while nobody has pinned it."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._link_of: dict[int, bytes] = {}
        self._pins = np.zeros(slots, np.int64)

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def pinned(self) -> int:
        """Slots that somebody relies on."""
        return int((self._pins > 0).sum())

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, links: Links) -> Numbers:
        """``int64[N]``: slots of these blocks, -1 where they are not here. Counts as use."""
        found = np.full(len(links), -1, np.int64)
        for at, link in enumerate(links):
            key = link.tobytes()
            slot = self._slot_of.get(key)
            if slot is not None:
                self._slot_of.move_to_end(key)
                found[at] = slot
        return found

    def take(self, count: int) -> list[int]:
        """Up to ``count`` slots to fill; older blocks that nobody relies on are given up for them."""
        if count > len(self._free):
            unused = [key for key, slot in self._slot_of.items() if not self._pins[slot]]
            for key in unused[: count - len(self._free)]:
                slot = self._slot_of.pop(key)
                del self._link_of[slot]
                self._free.append(slot)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def put(self, link: bytes, slot: int) -> None:
        """A taken slot holds this block now, verified."""
        if link in self._slot_of:
            self._free.append(slot)
            return
        self._slot_of[link] = slot
        self._link_of[slot] = link

    def give_back(self, slot: int) -> None:
        """A taken slot that holds nothing."""
        self._free.append(slot)

    def pin(self, slots: Numbers) -> None:
        np.add.at(self._pins, slots, 1)

    def unpin(self, slots: Numbers) -> None:
        np.subtract.at(self._pins, slots, 1)
