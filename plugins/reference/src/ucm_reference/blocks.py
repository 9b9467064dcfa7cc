"""Allocation of pages and slots: a free list; number 0 is the null block and is never handed out."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """``size`` blocks, of which 0 is null. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, 0, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return block not in self._used

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks, or None (and nothing taken) when there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give(self, blocks: Iterable[int]) -> list[int]:
        """Take back; null blocks are skipped. Returns what became free. A block that is not out is a bug."""
        given = [block for block in blocks if block]
        for block in given:
            self._used.remove(block)
        self._free.extend(reversed(given))
        return given
