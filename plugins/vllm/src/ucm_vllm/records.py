"""What the scheduler side remembers of a request and of a save under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator import HitPlan, LookupPlan
from ucm_core.identity import ContentChain
from ucm_vllm.keys import Prints
from ucm_vllm.lookup import Lookup
from ucm_vllm.messages import Rows, TransferOp

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Per row of the spec table, which of its blocks are stored, block 0 first.
Presence = Mapping[str, npt.NDArray[np.bool_]]


@dataclass(slots=True)
class Record:
    """One request. ``chain`` is None when it is not cacheable. ``attempts``: loads it may still fail."""

    request: Request
    chain: ContentChain | None
    attempts: int = 1
    #: Tokens [0, saved) need no further thought: stored, being stored, or given up.
    saved: int = 0
    #: What the last lookup said of the first ``answered_tokens`` tokens.
    present: Presence = field(default_factory=dict)
    answered_tokens: int = -1
    answered_at: float = 0.0
    lookup: Lookup | None = None
    #: What the answered lookup asked for, until its blocks were told to be in use.
    plan: LookupPlan | None = None
    #: What was promised to vLLM last.
    answer: HitPlan | None = None
    #: This admission was counted as a query.
    asked: bool = False
    #: vLLM's count of preemptions that was acted on: page numbers from before mean nothing any more.
    epoch: int = 0
    #: Saves that may still read blocks which a window can leave behind.
    exposed: set[int] = field(default_factory=set)
    #: Of the first ``decided`` tokens, the positions at which a state is kept.
    keep: frozenset[int] = frozenset()
    decided: int = 0


@dataclass(slots=True)
class LoadState:
    """A load until every worker has ended it. ``prints``: of its blocks, by number. ``pages``: engine
    blocks that others may share before the load has ended, and that are computed on it. ``bad``: numbers
    of blocks that some rank did not get, None when there are none.
    """

    op: TransferOp
    prints: Prints
    pages: Sequence[int] = ()
    ended: int = 0
    bad: Rows | None = None


@dataclass(slots=True)
class SaveState:
    """A save until every worker has ended it. ``failed``: numbers of blocks that were not stored."""

    record: Record
    op: TransferOp
    copied: int = 0
    ended: int = 0
    #: What it saved was computed on a bad load: workers throw it away.
    dropped: bool = False
    failed: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    epoch: int = field(init=False)

    def __post_init__(self) -> None:
        self.epoch = self.record.epoch
