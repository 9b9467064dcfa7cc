"""What is known of one request between the engine's calls: its tokens, its pages, its transfers.

The engine tells tokens and pages as *append-deltas* against what it told before. It does not tell when its
own lists shrink: after rejected drafts it frees the last pages, and pages it takes later in their place are
never told. So a page told for tokens that were not confirmed is worth nothing once the request has gone on
(:meth:`Record.distrust`); a hole is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.blocks import NO_PAGE
from ucm_core.identity import ContentChain
from ucm_trtllm.staging import Promise

Tables = list[npt.NDArray[np.int64]]


@dataclass(slots=True)
class Record:
    """``chain`` None: the request is left alone. ``prompt``, ``tokens``: how many there are, how many are in
    the chain. ``promise``: offered, no pages yet; ``pinned``: on its way into them. ``begin``, ``end``: the
    tokens promised; ``parked``: the engine waits for them. ``tables``: per layer group, page of each of its
    blocks. ``saved``: tokens up to which saves were issued; ``stored``: per row, blocks that the store was
    seen to have. ``cell``: where ranks count what they finish; ``loads``, ``saves``: operations issued.
    ``seen``: an output of the engine's scheduler has named it; ``drafted``: with draft tokens.
    """

    request_id: int
    chain: ContentChain | None
    prompt: int = 0
    tokens: int = 0
    promise: Promise | None = None
    pinned: Promise | None = None
    begin: int = 0
    end: int = 0
    parked: bool = False
    tables: Tables = field(default_factory=list)
    saved: int = 0
    stored: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    cell: int = -1
    loads: int = 0
    saves: int = 0
    seen: bool = False
    drafted: bool = False

    def set_tables(self, lists: Sequence[Sequence[int]]) -> None:
        """All pages of the request, as the engine has them now."""
        self.tables = [_pages(one) for one in lists]

    def extend_tables(self, lists: Sequence[Sequence[int]]) -> None:
        """Pages that were added since they were told last."""
        while len(self.tables) < len(lists):
            self.tables.append(_pages(()))
        for number, one in enumerate(lists):
            if len(one):
                self.tables[number] = np.concatenate([self.tables[number], _pages(one)])

    def distrust(self, position: int, page_tokens: int) -> None:
        """The request goes on at ``position``: pages told before for tokens from there on may have been
        freed and given to others, if drafts were there. Those of the prompt are not drafts."""
        if position < self.prompt or not self.drafted:
            return
        first = -(-max(position, self.prompt) // page_tokens)
        for table in self.tables:
            table[first:] = NO_PAGE


def _pages(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """The engine's list; whatever is negative is no page (it would address the last one)."""
    pages = np.array(numbers, np.int64)
    pages[pages < 0] = NO_PAGE
    return pages
