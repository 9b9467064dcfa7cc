"""One lane's share of an operation: its way between the rank's memory and a store, and what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucm_core.adapter.layers import RowTransfer
from ucm_core.adapter.transfer import BlockTransfer, reasons
from ucm_core.errors import UcmError
from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.store.contract import CommitMode, Status
from ucm_core.store.snapshot import SnapshotStore, SnapshotTask
from ucm_reference.cache.placement import Lane

_log = RateLimitedLogger(logging.getLogger("ucm.reference"))


@dataclass(slots=True)
class Part:
    """``index``: which blocks of the operation's row these are (of a state: the one, 0). ``states``: the
    snapshot store where the lane is one of states: whole states go through it."""

    lane: Lane
    index: npt.NDArray[np.int64]
    moved: RowTransfer
    states: SnapshotStore | None = None
    whole: SnapshotTask | None = None

    @property
    def transfer(self) -> BlockTransfer:
        return self.moved.transfer

    def load(self) -> None:
        """Start loading all layers."""
        if self.states is None:
            self.transfer.load(range(self.lane.shards))
        else:
            self._whole(self.states.get)

    def dump(self, commit: CommitMode) -> None:
        """Start dumping all layers."""
        if self.states is None:
            self.transfer.dump(range(self.lane.shards), commit)
        else:
            put = self.states.put
            self._whole(lambda ids, addresses: put(ids, addresses, commit=commit))

    def _whole(self, move: Callable[..., SnapshotTask]) -> None:
        try:
            self.whole = move(self.transfer.ids, self.transfer.addresses)
        except (UcmError, ValueError) as error:
            self.transfer.refused.append(str(error))

    def is_over(self, timeout_s: float = 0.0) -> bool:
        """Loaded or not, copied or not: no byte moves any more."""
        if self.whole is not None:
            return self.whole.check(timeout_s)
        return self.transfer.is_over(timeout_s)

    def is_answered(self) -> bool:
        """The last stage has said what became of every block."""
        if self.whole is not None:
            return not bool((self.whole.durable_results() == Status.PENDING).any())
        return self.transfer.is_answered()

    def wait(self, timeout_s: float) -> None:
        """Until it is over; what is not by then is fenced."""
        if self.whole is not None:
            self.whole.wait(timeout_s)
        self.transfer.wait(timeout_s)

    def fence(self) -> None:
        if self.whole is not None:
            self.whole.cancel()
        self.transfer.fence()

    def publish(self) -> None:
        """Commit what was dumped and held back."""
        if len(self.transfer):
            self.transfer.store.commit(self.transfer.ids)

    def discard(self) -> None:
        """Throw away what was dumped and held back."""
        self.transfer.store.discard(self.transfer.ids)

    def failed(self, *, durable: bool) -> npt.NDArray[np.bool_]:
        """``bool[n]``; tells why, once in a while. ``durable``: by what the last stage said (saves)."""
        if self.whole is not None:
            said = self.whole.durable_results() if durable else self.whole.wait(0.0)
        else:
            said = self.transfer.statuses(durable=durable)
        if self.moved.missed:
            said = np.where(said == Status.OK, np.uint8(Status.CANCELLED), said)
        bad: npt.NDArray[np.bool_] = said != Status.OK
        if bad.any():
            what = "save" if durable else "load"
            names = ", ".join(Status(int(s)).name.lower() for s in np.unique(said[bad]))
            why = reasons([self.transfer], durable=durable)
            _log.warning(
                f"{what} failed",
                "%s of row %s failed (%d of %d blocks): %s%s",
                what,
                self.lane.at.row.name,
                int(bad.sum()),
                len(bad),
                names,
                why,
            )
        return bad
