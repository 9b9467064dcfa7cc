"""What the scheduler side and the worker side tell each other, once per engine step.

Everything per block is a numpy array, so that a message costs the same whatever the prompt's length.
``links`` are rows of the content chain (``uint8[N, 32]``): every rank derives the ids of its own
coordinates from them with the same function the scheduler used for its lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

Links = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class TransferOp:
    """One load or save of one request: stored blocks ``blocks[N]`` and the pages that hold them.

    ``pages`` is ``int32[N, pieces]`` (engine block ids). A load touches only tokens ``[begin, end)``: what
    lies below is others' or there already, what lies above is computed. ``attempt`` shifts the
    elected writer when an earlier one failed.
    """

    op_id: int
    request_id: str
    links: Links
    blocks: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int32]
    begin: int
    end: int
    attempt: int = 0


@dataclass(slots=True)
class UcmMetadata(KVConnectorMetadata):
    """Scheduler -> every worker.

    ``preempted``: requests whose blocks the engine is about to reuse: their saves must not read any
    more. ``finishing``: requests whose blocks the engine holds until this worker reports them sent.
    ``idle``: this step computes nothing.
    """

    loads: list[TransferOp] = field(default_factory=list)
    saves: list[TransferOp] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finishing: list[str] = field(default_factory=list)
    idle: bool = False


def _merge(mine: dict[int, Rows], theirs: dict[int, Rows]) -> None:
    for op_id, rows in theirs.items():
        mine[op_id] = np.union1d(mine[op_id], rows) if op_id in mine else rows


def _add(mine: dict[int, int], theirs: dict[int, int]) -> None:
    for op_id, count in theirs.items():
        mine[op_id] = mine.get(op_id, 0) + count


@dataclass(slots=True)
class UcmWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers -> scheduler, aggregated over the workers of one step.

    ``copied``/``ended``: save op -> number of workers whose source is free / whose result is final.
    ``failed``: save op -> rows that were not stored. ``bad``: load op -> rows that did not arrive.
    """

    copied: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    failed: dict[int, Rows] = field(default_factory=dict)
    bad: dict[int, Rows] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> UcmWorkerMetadata:
        assert isinstance(other, UcmWorkerMetadata)
        _add(self.copied, other.copied)
        _add(self.ended, other.ended)
        _merge(self.failed, other.failed)
        _merge(self.bad, other.bad)
        return self

    def __bool__(self) -> bool:
        return bool(self.copied or self.ended or self.failed or self.bad)
