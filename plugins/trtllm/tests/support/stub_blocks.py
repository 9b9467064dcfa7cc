"""Pages of the stub's engine: who has them, what may be reused, and poison in what is given away."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from stub_memory import RankMemory


@dataclass
class Blocks:
    """Pages of one layer group, the same numbers on every rank. ``tree``: content -> page, of full blocks.
    ``untouched``: pages that were taken back without asking; what lies there stays until somebody computes
    or loads: the engine tells of it with its next message, before either.
    """

    group: int
    count: int
    memories: list[RankMemory]
    owners: dict[int, int] = field(default_factory=dict)
    tree: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)
    key_of: dict[int, tuple[int, int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    untouched: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = list(range(self.count))

    @property
    def available(self) -> int:
        return len(self.free) + sum(1 for page in self.tree.values() if not self.owners.get(page))

    def take(self) -> int:
        """A page whose content is worthless: whoever still writes or reads there is wrong."""
        if self.free:
            page = self.free.pop(0)
        else:
            key = next(k for k, page in self.tree.items() if not self.owners.get(page))
            page = self.tree.pop(key)
            del self.key_of[page]
        self.owners[page] = 1
        if page in self.untouched:
            self.untouched.discard(page)
            return page
        for memory in self.memories:
            memory.poison(self.group, page)
        return page

    def reuse(self, key: tuple[int, int]) -> int | None:
        """The page that holds a block of this prefix, if it is still there."""
        page = self.tree.get(key)
        if page is not None:
            self.tree.move_to_end(key)
            self.owners[page] = self.owners.get(page, 0) + 1
        return page

    def keep(self, key: tuple[int, int], page: int) -> None:
        """A full block may be reused after its request is gone."""
        if key not in self.tree and page not in self.key_of:
            self.tree[key] = page
            self.key_of[page] = key

    def drop(self, page: int, *, told: bool = True) -> None:
        """``told``: the connector has agreed, or nothing may move there any more."""
        self.owners[page] -= 1
        if self.owners[page]:
            return
        if page not in self.key_of:
            if not told:
                self.untouched.add(page)
            for memory in self.memories if told else ():
                memory.poison(self.group, page)
            self.free.append(page)

    def forget(self) -> None:
        """Nothing unowned is reusable any more."""
        for key, page in list(self.tree.items()):
            if not self.owners.get(page):
                del self.tree[key], self.key_of[page]
                for memory in self.memories:
                    memory.poison(self.group, page)
                self.free.append(page)
