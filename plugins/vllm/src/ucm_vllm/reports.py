"""Worker side: what the next collection calls hand to vLLM, and how failures are counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.transfer import Statuses
from ucm_core.store.contract import Status
from ucm_vllm.lanes import Part
from ucm_vllm.messages import UcmWorkerMetadata
from ucm_vllm.stats import UcmStats

Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Report:
    """``received``: requests whose asynchronous load has ended, well or badly; ``failed``: those of them
    that vLLM must start over. ``failed_pages``: engine blocks that a load did not fill. ``meta``: news
    for the scheduler side.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_pages: set[int] = field(default_factory=set)
    meta: UcmWorkerMetadata = field(default_factory=UcmWorkerMetadata)

    def take_requests(self) -> tuple[set[str], set[str]]:
        """(received, failed), once."""
        taken = self.received, self.failed
        self.received, self.failed = set(), set()
        return taken

    def take_pages(self) -> set[int]:
        pages, self.failed_pages = self.failed_pages, set()
        return pages

    def take_meta(self) -> UcmWorkerMetadata | None:
        if not self.meta:
            return None
        meta, self.meta = self.meta, UcmWorkerMetadata()
        return meta


def count_blocks(stats: UcmStats, what: str, part: Part, statuses: Statuses) -> Bools:
    """Count what became of a part's blocks: ``what``, "load" or "save", in blocks and bytes, and failures
    by kind. Returns which have failed."""
    failed: Bools = statuses != Status.OK
    if failed.any():
        kinds, counts = np.unique(statuses[failed], return_counts=True)
        for kind, count in zip(kinds, counts, strict=True):
            stats.add(f"{what}_failed_blocks", int(count), Status(int(kind)).name.lower())
    good = int(len(statuses) - failed.sum())
    stats.add(f"{what}_blocks", good)
    stats.add(f"{what}_bytes", good * part.lane.block_bytes)
    return failed
