"""The four-call contract is asserted, so a mistake of the engine or an executor cannot pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from ucm_reference import MODELS, Engine, Limits, LockstepExecutor, Sizes, Topology
from ucm_reference.connector import News, Port, StepView
from ucm_reference.memory import Tensor
from ucm_reference.request import Request
from ucm_reference.topology import Rank
from workloads import requests


class Recorder:
    """A connector that does nothing and remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.tensors: list[Tensor] = []

    def register(self, rank: Rank, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def start_load(self, message: Any) -> None:
        self.calls.append(("start", -1))

    def wait_for_layer(self, layer: int) -> None:
        self.calls.append(("wait", layer))

    def save_layer(self, layer: int) -> None:
        self.calls.append(("save", layer))

    def wait_for_save(self) -> Any:
        self.calls.append(("end", -1))

    def close(self) -> None:
        self.calls.append(("close", -1))


class Watcher:
    """The scheduler side of it: never a hit, no wishes."""

    def __init__(self) -> None:
        self.views: list[StepView] = []

    layered = False

    def added(self, request: Request) -> None: ...

    def match(self, request: Request) -> int | None:
        return 0

    def allocated(self, request: Request, tokens: int) -> None: ...

    def snapshot_positions(self, request: Request, start: int, end: int) -> Sequence[int]:
        return ()

    def build(self, view: StepView) -> Any:
        self.views.append(view)

    def update(self, reports: Sequence[Any]) -> News:
        return News()

    def finished(self, request: Request) -> bool:
        return False

    def close(self) -> None: ...


def test_every_rank_sees_every_layer_of_its_stage_in_order() -> None:
    model = MODELS["deltanet-8"]
    recorders: dict[Rank, Recorder] = {}

    def connect(rank: Rank) -> Recorder:
        return recorders.setdefault(rank, Recorder())

    sizes = Sizes()
    executor = LockstepExecutor(model, Topology(tp=2, pp=2), sizes, connect=connect)
    watcher = Watcher()
    with Engine(
        model, executor, sizes=sizes, limits=Limits(tokens=90), connector=watcher
    ) as engine:
        engine.run(requests(model, 3, 60, 100))
    assert len(recorders) == 4
    assert recorders[Rank(0, 0, 0)].calls == recorders[Rank(0, 0, 1)].calls
    mixed = 0
    for rank, recorder in recorders.items():
        layers = range(4) if rank.pp == 0 else range(4, 8)
        text = [name for name, _ in recorder.calls]
        assert text.count("start") == text.count("end") == engine.steps
        assert next(layer for _, layer in recorder.calls if layer >= 0) == layers.start
        # Prompts and decodes of one step are two passes through each layer, one after the other.
        once = [("wait", layers.start), ("save", layers.start)]
        twice = once * 2
        mixed += any(recorder.calls[i : i + 5] == [("start", -1), *twice] for i in range(len(text)))
    assert mixed == 4
    assert sum(sum(view.computed.values()) for view in watcher.views) > 0


def test_memory_of_ranks_is_their_own() -> None:
    model = MODELS["x-hybrid-96"]
    recorders: list[Recorder] = []

    def connect(rank: Rank) -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    executor = LockstepExecutor(
        model, Topology(tp=8, pp=2), Sizes(pages=4, slots=4), connect=connect
    )
    executor.close()
    spans = sorted(
        (t.data.ctypes.data, t.data.ctypes.data + t.data.nbytes)
        for recorder in recorders
        for t in recorder.tensors
    )
    assert all(t.data.flags.c_contiguous for r in recorders for t in r.tensors)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    layers = sorted(
        layer for r in (recorders[0], recorders[8]) for t in r.tensors for layer in t.layers
    )
    assert layers == [i for i, row in enumerate(model.layers) if row.kind != "cross"]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["wait 0"], "out of order"),
        (["start", "start"], "out of order"),
        (["start", "save 0"], "out of order"),
        (["start", "wait 1"], "follows layer"),
        (["start", "wait 0", "wait 1"], "out of order"),
        (["start", "wait 0", "save 1"], "while layer 0 runs"),
        (["start", "wait 0", "save 0", "end"], "ends after layer 0"),
        (["start", "end"], "ends after layer -1"),
    ],
)
def test_wrong_orders_are_caught(calls: list[str], message: str) -> None:
    port = Port(Recorder(), range(2))
    with pytest.raises(AssertionError, match=message):
        replay(port, calls)


def replay(port: Port, calls: list[str]) -> None:
    for call in calls:
        name, *rest = call.split()
        if name == "start":
            port.start_load(None)
        elif name == "end":
            port.wait_for_save(idle=False)
        elif name == "wait":
            port.wait_for_layer(int(rest[0]))
        else:
            port.save_layer(int(rest[0]))


def test_right_orders_pass() -> None:
    port = Port(Recorder(), range(2))
    for idle in (False, True, False):
        port.start_load(None)
        for layer in () if idle else (0, 0, 1, 1):
            port.wait_for_layer(layer)
            port.save_layer(layer)
        port.wait_for_save(idle=idle)
