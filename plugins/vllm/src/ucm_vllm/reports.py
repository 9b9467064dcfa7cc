"""Worker side: what the next collection calls hand to vLLM, and how failures are counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ucm_core.adapter.transfer import Statuses
from ucm_core.store.contract import Status
from ucm_vllm.messages import UcmWorkerMetadata
from ucm_vllm.stats import UcmStats


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


def count_failures(stats: UcmStats, name: str, statuses: Statuses) -> None:
    """Add failed blocks to a counter, by kind."""
    if len(statuses):
        kinds, counts = np.unique(statuses, return_counts=True)
        for kind, count in zip(kinds, counts, strict=True):
            stats.add(name, int(count), Status(int(kind)).name.lower())
