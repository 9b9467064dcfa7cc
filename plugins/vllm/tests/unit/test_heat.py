"""Used blocks are told to the stores: once per prefix and interval, in batches, down to the files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from real_stores import RealWorld
from scripted_engine import ScriptedEngine, World, prompt
from ucm_vllm import heat
from ucm_vllm.heat import Heat

LONG_AGO = 1_000_000_000.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat, "BATCH_S", 0.02)
    monkeypatch.setattr(heat, "REPEAT_S", 0.0)


def _eventually(check: Any, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def _ids(engine: ScriptedEngine, tokens: list[int]) -> list[bytes]:
    seed = engine.connector._deployment.placement.all()[0].seed
    return [bytes(i) for i in engine.chain_of(tokens).object_ids(seed)]


def test_a_loaded_prefix_and_a_local_one_are_told(engine, world: World) -> None:
    tokens = prompt(1, 200)
    engine().generate("seed", tokens)
    e = engine()
    store = e.connector.deployment_store()
    e.generate("external", [*tokens[:128], 5])
    _eventually(lambda: store.touched == _ids(e, tokens)[:2])
    store.touched.clear()
    e.generate("local", [*tokens[:64], *prompt(2, 100)])  # vLLM's own cache has it
    _eventually(lambda: store.touched == _ids(e, tokens)[:1])
    assert e.counted["touched_objects"] == 3


def test_a_miss_tells_nothing(engine, world: World) -> None:
    e = engine()
    e.generate("a", prompt(1, 200))
    e.close()  # sends what waits
    assert e.connector._deployment._stores == {}
    assert all(store.touched == [] for store in world.stores)
    assert "touched_objects" not in e.counted


def test_what_waits_is_sent_at_shutdown(engine, world: World, monkeypatch) -> None:
    monkeypatch.setattr(heat, "BATCH_S", 60.0)
    tokens = prompt(1, 200)
    engine().generate("seed", tokens)
    e = engine()
    store = e.connector.deployment_store()
    e.generate("a", tokens)
    assert store.touched == []
    e.close()
    assert store.touched == _ids(e, tokens)


def test_one_batch_however_many_requests_share_a_prefix(engine, world: World, monkeypatch) -> None:
    monkeypatch.setattr(heat, "REPEAT_S", 60.0)
    tokens = prompt(1, 200)
    engine().generate("seed", tokens)
    e = engine()
    for i in range(20):
        e.generate(f"r{i}", [*tokens[:192], i + 3], max_tokens=1)
    e.close()
    assert e.counted["touched_objects"] == 3


def test_a_hung_touch_holds_no_step_up(engine, world: World, monkeypatch) -> None:
    tokens = prompt(1, 200)
    wanted = engine().generate("seed", tokens)
    e = engine()
    release, inside = threading.Event(), threading.Event()

    def hang(ids: np.ndarray) -> None:
        inside.set()
        release.wait(20)

    monkeypatch.setattr(e.connector.deployment_store(), "touch", hang)
    assert e.generate("a", tokens) == wanted
    assert inside.wait(5)
    before = time.monotonic()
    e.scheduler.reset_prefix_cache()
    e.connector._sched._lookups._timeout_s = 0.1
    assert e.generate("b", tokens) == wanted  # the thread is busy: a miss, and no hang
    assert time.monotonic() - before < 5
    release.set()


class _Plan:
    """A plan of one row, as far as heat reads it."""

    def __init__(self, blocks: int, window: int | None = None) -> None:
        self.ids = {"s": np.arange(blocks * 16, dtype=np.uint8).reshape(blocks, 16)}

        class Row:
            block_tokens = 64

        row = Row()
        row.window = window  # type: ignore[attr-defined]

        class At:
            pass

        at = At()
        at.row = row  # type: ignore[attr-defined]

        class Segment:
            positions = None
            first, begin, end, store = 0, 0, blocks, "s"

        segment = Segment()
        segment.at = at  # type: ignore[attr-defined]
        self.segments = (segment,)


class _Touched:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def touch(self, ids: np.ndarray) -> None:
        self.calls.append(len(ids))


def _sent(pulses: Heat) -> list[int]:
    store = _Touched()
    pulses.send({"s": store})  # type: ignore[dict-item]
    return store.calls


def test_a_prefix_is_told_again_only_after_a_while(monkeypatch) -> None:
    monkeypatch.setattr(heat, "REPEAT_S", 10.0)
    now = [100.0]
    pulses = Heat(lambda: now[0])
    plan: Any = _Plan(8)
    assert pulses.hit(plan, 256, b"x") == (4, 0)
    assert pulses.hit(plan, 256, b"x") == (0, 0)
    assert pulses.hit(plan, 512, b"y") == (8, 0)
    assert _sent(pulses) == [12], "one call per store and batch"
    assert pulses.due_in() is None
    now[0] += 11
    assert pulses.hit(plan, 256, b"x") == (4, 0)


def test_what_does_not_fit_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(heat, "PENDING_LIMIT", 10)
    pulses = Heat()
    plan: Any = _Plan(8)
    assert pulses.hit(plan, 512, b"x") == (8, 0)
    assert pulses.hit(plan, 512, b"y") == (0, 8)
    assert _sent(pulses) == [8]


def test_a_window_is_hot_only_as_far_as_it_reaches() -> None:
    pulses = Heat()
    plan: Any = _Plan(8, window=100)
    assert pulses.hit(plan, 512, b"x") == (2, 0)  # tokens 412..511 lie in blocks 6 and 7
    assert _sent(pulses) == [2]


# -- down to the files ---------------------------------------------------------------------------------


def _age(files: Iterable[Path]) -> None:
    for path in files:
        os.utime(path, (LONG_AGO, LONG_AGO))


def _young(files: Iterable[Path]) -> set[Path]:
    return {path for path in files if path.stat().st_atime > LONG_AGO + 1}


@pytest.mark.parametrize("pipeline", ["Posix", "Cache|Posix"])
def test_hits_reach_the_access_time_of_files(engine_over, tmp_path: Path, pipeline: str) -> None:
    """B32: loads, hits of the host cache above the files, and hits of vLLM's own cache alike."""
    options: dict[str, Any] = {"posix_capacity_gb": "100 MiB"}
    if "Cache" in pipeline:
        options["cache_buffer_capacity_gb"] = "32 MiB"
    world = RealWorld(tmp_path, pipeline, **options)
    e = engine_over(world)
    used, other = prompt(1, 200), prompt(2, 200)
    e.generate("used", used)
    wanted = set(_settled(e, world, 3))
    e.generate("other", other)
    everything = _settled(e, world, 6)
    _age(everything)
    e.generate("local hit", used)
    _eventually(lambda: _young(everything) == wanted)
    _age(everything)
    e.scheduler.reset_prefix_cache()
    e.generate("external hit", used)
    assert e.counted["hit_tokens"] == 192
    _eventually(lambda: _young(everything) == wanted)


def _settled(engine: ScriptedEngine, world: RealWorld, count: int) -> list[Path]:
    _eventually(lambda: len(world.files()) == count)
    return world.files()
