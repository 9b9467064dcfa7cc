"""Random executor schedules: chunks, drafts and rewinds, cancels, preemptions, failing and slow storage.

Nothing is asserted here but what every schedule must keep: the stub checks each byte a step reads, and each
id that is told; here the rest is counted and bounded.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from stub_executor import StubExecutor
from stub_manager import StubRequest
from stub_memory import Shape
from stub_storage import FakeStorage
from stub_world import World
from ucm_trtllm.worker import WorkerSide

SHAPES = (
    Shape(pages=96),
    Shape(layers=4, groups=((None, (0, 2)), (48, (1, 3))), pages=96),
    Shape(latent=True, heads=1, head_size=8, pages=96),
    Shape(page_tokens=32, pages=32),
    Shape(scales=2, page_tokens=16, pages=48),
)
#: Longest a query may wait, and what a loaded machine may add to it.
WAIT_MS = 20
SLACK_S = 1.5


@dataclass
class Tally:
    """What a campaign has seen, so that it cannot pass without doing anything."""

    seen: Counter[str] = field(default_factory=Counter)
    longest_query_s: float = 0.0
    longest_step_s: float = 0.0

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.seen.items()))
        return (
            f"{counts}; longest query {self.longest_query_s * 1e3:.0f} ms, longest step "
            f"{self.longest_step_s * 1e3:.0f} ms"
        )


def slow_down(monkeypatch: pytest.MonkeyPatch, stream: random.Random) -> None:
    """Copies in the background that take their time, and copies out that are not looked at at once."""
    copy, poll = WorkerSide._copy, WorkerSide._poll

    def slow_copy(side: WorkerSide, load: Any) -> None:
        if load.op.parked:
            time.sleep(stream.choice((0.0, 0.003, 0.02)))
        copy(side, load)

    def lazy_poll(side: WorkerSide) -> None:
        if stream.random() < 0.4:
            poll(side)

    monkeypatch.setattr(WorkerSide, "_copy", slow_copy)
    monkeypatch.setattr(WorkerSide, "_poll", lazy_poll)


def run_schedule(world: World, seed: int, tally: Tally) -> None:
    """One storage, two engines one after the other, a dozen requests."""
    stream = random.Random(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow_down(monkeypatch, random.Random(seed + 1))
        _run(world, stream, tally, monkeypatch)


def _run(
    world: World, stream: random.Random, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2 = stream.random() < 0.6
    shape = stream.choice(SHAPES if v2 else SHAPES[:1] + SHAPES[2:4])
    ranks = 1 if shape.latent and stream.random() < 0.5 else stream.choice((1, 1, 2))
    storage = FakeStorage(timeout_ms=400)
    storage.install(monkeypatch)
    world.configure(
        promise_loads=stream.choice(("sync", "async", "auto")),
        promise_wait_ms=WAIT_MS,
        promise_buffer_gb=stream.choice(("8 MiB", "256 KiB")),
        block_tokens=stream.choice((16, 64)) if not shape.scales else 64,
    )
    base = [[stream.randrange(3, 1000) for _ in range(200)] for _ in range(2)]
    for turn in range(2):
        _faults(storage, stream, tally, turn)
        options = {
            "v2": v2,
            "ranks": ranks,
            "chunk": stream.choice((16, 40, 64, 256)),
            "drafts": (lambda: stream.randrange(4)) if stream.random() < 0.4 else (lambda: 0),
            "partial": not v2 and stream.random() < 0.2,
            "local_reuse": stream.random() < 0.6,
            "short": _short(stream, shape) if v2 and stream.random() < 0.3 else (lambda n: n),
            "batch": stream.choice((1, 3, 4)),
        }
        with world.engine(shape, **options) as engine:
            _drive(engine, storage, stream, tally, base, turn)
        tally.seen["engines"] += 1
    tally.seen["schedules"] += 1


def _faults(storage: FakeStorage, stream: random.Random, tally: Tally, turn: int) -> None:
    storage.latency_us = stream.choice((0, 0, 500, 5_000, 60_000))
    storage.fail_nth_read = stream.choice((0, 0, 0, 3))
    storage.fail_nth_write = stream.choice((0, 0, 0, 3))
    tally.seen["slow storages"] += storage.latency_us >= 5_000
    tally.seen["failing storages"] += bool(storage.fail_nth_read or storage.fail_nth_write)
    if turn and stream.random() < 0.4:
        tally.seen["damaged objects"] += storage.damage(stream, 0.2)


def _short(stream: random.Random, shape: Shape):  # type: ignore[no-untyped-def]
    def taken(offer: int) -> int:
        pages = offer // shape.page_tokens
        return stream.randrange(pages + 1) * shape.page_tokens

    return taken


def _drive(
    engine: StubExecutor,
    storage: FakeStorage,
    stream: random.Random,
    tally: Tally,
    base: list[list[int]],
    turn: int,
) -> None:
    requests = []
    for number in range(stream.randrange(3, 7)):
        shared = stream.choice(base)[: stream.choice((64, 130, 192, 200))]
        tail = [stream.randrange(3, 1000) for _ in range(stream.randrange(1, 40))]
        salt = stream.choice((None, None, None, "other"))
        new = stream.choice((1, 5, 20, 60))
        requests.append(
            engine.add(StubRequest(turn * 100 + number + 1, shared + tail, new, cache_salt=salt))
        )
    hung_until = 0.0
    for _ in range(3000):
        if not engine.waiting and not engine.active and not engine.held:
            break
        if stream.random() < 0.04:
            moving = [r for r in requests if r.state in ("loading", "saving")]
            victim = stream.choice(moving or requests)
            if victim.state != "done" and not victim.cancelled:
                tally.seen[f"cancelled {victim.state}"] += 1
                engine.cancel(victim)
        if engine.v2 and stream.random() < 0.03 and engine.active:
            victim = stream.choice(engine.active)
            tally.seen["preemptions"] += victim.state in ("context", "generation")
            engine.preempt(victim, reset=stream.random() < 0.5)
        if not hung_until and stream.random() < 0.004:
            storage.hang()
            hung_until = time.monotonic() + 0.05
            tally.seen["hangs"] += 1
        if hung_until and time.monotonic() > hung_until:
            storage.recover()
            hung_until = 0.0
        before = time.monotonic()
        engine.step()
        tally.longest_step_s = max(tally.longest_step_s, time.monotonic() - before)
        tally.seen["steps"] += 1
        if all(request.state in ("loading", "saving", "done") for request in requests):
            time.sleep(0.002)
    else:
        raise AssertionError(f"not done: {[(r.request_id, r.state) for r in requests]}")
    storage.recover()
    tally.longest_query_s = max(tally.longest_query_s, engine.longest_query_s)
    assert engine.longest_query_s < WAIT_MS / 1000 + SLACK_S
    tally.seen["requests"] += len(requests)
    tally.seen["hits"] += sum(any(n for _, n in r.matched) for r in requests)
    tally.seen["tokens given"] += engine.external_tokens
    tally.seen["tokens checked"] += engine.checked
    _leave_nothing(engine)


def _leave_nothing(engine: StubExecutor) -> None:
    """Every id was told, every pin and page given back, every map is empty."""
    manager = engine.manager
    under_way = (manager.new_loading, manager.new_saving, manager.loading, manager.saving)
    until = time.monotonic() + 5.0
    while any(under_way) and time.monotonic() < until:
        engine.step()
        time.sleep(0.002)
    assert not any(under_way), under_way
    assert all(not told for pair in manager.local for told in pair)
    for blocks in engine.blocks:
        assert not any(blocks.owners.values()), "a page was never given back"
    while time.monotonic() < until:
        manager.all_ranks(lambda worker: worker.get_finished([], []))
        left = engine.manager.scheduler._side.pending()
        if not any(left.values()):
            return
        time.sleep(0.005)
    raise AssertionError(f"left behind: {left}")
