"""What a cache connector is to this engine: a scheduler side, and a worker side on every rank.

The engine asserts its own part of the contract (:class:`Port`) and knows nothing of what is behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ucm_reference.memory import Tensor
from ucm_reference.request import Request
from ucm_reference.topology import Rank


@dataclass(slots=True)
class Snapshot:
    """The state of ``request_id`` after ``position`` tokens lies in ``slot`` when the step has run."""

    request_id: str
    position: int
    slot: int


@dataclass(slots=True)
class StepView:
    """What the scheduler is about to run. ``computed``: request -> tokens that will be confirmed.
    ``preempted``: requests whose memory was taken back. ``idle``: nothing is computed."""

    computed: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    idle: bool = False


@dataclass(slots=True)
class News:
    """What a connector's scheduler side tells the engine after a step.

    ``loaded``: request -> tokens that are in place (after a failure fewer than promised; 0: the request
    starts over, and asks again). ``sent``:
    finished requests whose memory nobody reads any more. ``slots``: snapshot slots that are free again.
    ``invalid``: requests that computed in this step on a load which turned out bad -> tokens that are
    right; what they computed beyond is void.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    invalid: dict[str, int] = field(default_factory=dict)


class SchedulerConnector(Protocol):
    """Used from the scheduler's thread only."""

    @property
    def layered(self) -> bool:
        """True: a request with a match computes in the very step that loads it, layer by layer."""

    def added(self, request: Request) -> None: ...

    def match(self, request: Request) -> int | None:
        """Tokens that can be loaded; 0: none; None: ask again later. Cheap, no side effects."""

    def allocated(self, request: Request, tokens: int) -> None:
        """Memory for ``tokens`` matched tokens is there; the load may start (0: nothing to load)."""

    def snapshot_positions(self, request: Request, start: int, end: int) -> Sequence[int]:
        """Positions in ``(start, end]`` at which the state is to be kept for the connector."""

    def build(self, view: StepView) -> Any:
        """The message that every worker gets with this step."""

    def update(self, reports: Sequence[Any]) -> News:
        """One report of each worker; what follows for the engine."""

    def finished(self, request: Request) -> bool:
        """The request ended. True: its memory must stay until the news say ``sent``."""

    def close(self) -> None: ...


class WorkerConnector(Protocol):
    """One rank. The four calls come from one thread at a time, in the order that ``Port`` asserts."""

    def register(self, rank: Rank, tensors: Sequence[Tensor]) -> None:
        """The rank's memory, kept alive by the engine until ``close``."""

    def start_load(self, message: Any) -> None:
        """Before the first layer. Memory of preempted requests may be written right after it."""

    def wait_for_layer(self, layer: int) -> None: ...

    def save_layer(self, layer: int) -> None: ...

    def wait_for_save(self) -> Any:
        """After the last layer; returns the rank's report of the step."""

    def close(self) -> None: ...


class Port:
    """A worker connector behind assertions of the four-call contract.

    ``start_load`` first; then per layer, ascending, ``wait_for_layer`` before and ``save_layer`` after it,
    possibly several times in a row for one layer; ``wait_for_save`` last, once. An idle step has no layers.
    """

    def __init__(self, connector: WorkerConnector, stage: range) -> None:
        self._connector = connector
        self._stage = stage
        self._layer = stage.start - 1
        self._state = "closed"

    def start_load(self, message: Any) -> None:
        self._expect("closed", "start_load")
        self._state, self._layer = "between", self._stage.start - 1
        self._connector.start_load(message)

    def wait_for_layer(self, layer: int) -> None:
        self._expect("between", f"wait_for_layer({layer})")
        if layer not in (self._layer, self._layer + 1) or layer not in self._stage:
            raise AssertionError(f"layer {layer} follows layer {self._layer} of {self._stage}")
        self._state, self._layer = "inside", layer
        self._connector.wait_for_layer(layer)

    def save_layer(self, layer: int) -> None:
        self._expect("inside", f"save_layer({layer})")
        if layer != self._layer:
            raise AssertionError(f"save_layer({layer}) while layer {self._layer} runs")
        self._state = "between"
        self._connector.save_layer(layer)

    def wait_for_save(self, *, idle: bool) -> Any:
        self._expect("between", "wait_for_save")
        last = self._stage.start - 1 if idle else self._stage.stop - 1
        if self._layer != last:
            raise AssertionError(f"the step ends after layer {self._layer}, expected {last}")
        self._state = "closed"
        return self._connector.wait_for_save()

    def close(self) -> None:
        self._connector.close()

    def _expect(self, state: str, call: str) -> None:
        if self._state != state:
            raise AssertionError(f"{call} is out of order: the step is {self._state!r}")
