"""Aborts, preemptions and late news in every state: nothing raised, told twice, overwritten or left."""

from __future__ import annotations

import pytest

from scripted_engine import ScriptedEngine, World, prompt
from ucm_core.store.contract import Status
from ucm_vllm.worker_loads import IDLE_WAIT_S


def _pump(engine: ScriptedEngine) -> None:
    """The store does all it was asked for, step by step, until the engine has nothing left to do."""
    for _ in range(500):
        for task in engine.all_tasks():
            task.run()
            task.finish()
        if not engine.scheduler.has_requests():
            return
        engine.step()
    raise AssertionError(f"the engine does not come to an end: {engine.pending()}")


def _settle(engine: ScriptedEngine) -> None:
    """Late completions, then steps without the request, then nothing may be left."""
    _pump(engine)
    engine.step()
    assert engine.scheduler.requests == {}
    engine.check_idle()
    _, received = engine.check_told_once()
    # A request may be received again only after it was preempted; these tests load once each.
    assert all(count == 1 for count in received.values()), received


@pytest.fixture
def manual(world: World) -> World:
    world.auto = False
    return world


def _seeded(world: World, engine, tokens: list[int]) -> None:  # type: ignore[no-untyped-def]
    world.auto = True
    engine().generate("seed", tokens)
    world.auto = False


STATES = ["never scheduled", "looked up", "allocated", "loading", "saving", "finished"]


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(engine, manual: World, state: str) -> None:
    """B15."""
    tokens = prompt(1, 200)
    if state in ("looked up", "allocated", "loading"):
        _seeded(manual, engine, tokens)
    e = engine()
    request = e.add("a", tokens, max_tokens=8)
    if state == "looked up":
        assert e.connector.get_num_new_matched_tokens(request, 0) == (192, True)
    elif state == "allocated":
        output = (
            e.scheduler.schedule()
        )  # blocks and the load operation exist, the worker is not told
        e.abort("a")
        e._update(output, e.execute(output))
    elif state == "loading":
        e.step()
        assert e.worker.pending()["loads"] == 1
    elif state == "saving":
        e.step()
        assert e.worker.pending()["saves"] == 1
    elif state == "finished":
        for _ in range(8):
            e.step()
        assert "a" in e.finished
    e.abort("a")
    e.abort("a")
    if state in ("allocated", "loading", "saving", "finished"):
        e.step()
        assert "a" in e.scheduler.requests, "its blocks must be held while they are read or written"
    _settle(e)


def test_blocks_are_held_until_copied_and_then_reused(engine, manual: World) -> None:
    e = engine(blocks=12)
    e.add("a", prompt(1, 200), max_tokens=1)
    e.step()
    assert "a" in e.finished
    e.add("b", prompt(2, 200), max_tokens=1)
    for _ in range(20):
        e.step()  # b cannot get blocks: a's are still being read
    assert "b" not in e.finished
    (task,) = e.all_tasks()
    task.run()  # source copied, not yet durable: enough to give the blocks back
    for _ in range(3):
        e.step()
    assert "b" in e.finished
    task.finish()
    stored = dict(manual.objects)
    _settle(e)
    assert len(stored) == 3
    manual.auto, manual.objects = True, stored
    check = engine()
    check.generate("c", prompt(1, 200))  # checks the bytes: b overwrote those pages meanwhile
    assert check.counted["hit_tokens"] == 192


@pytest.mark.parametrize("copied_in_time", [True, False])
def test_preemption_never_overwrites_what_is_being_copied(
    engine, manual: World, copied_in_time: bool
) -> None:
    """B07: each key is absent or has the original bytes, although the pages are reused at once."""
    e = engine(blocks=14, max_num_seqs=2, max_num_batched_tokens=512)
    e.store.copy_when_waited = copied_in_time
    e.add("old", prompt(1, 190), max_tokens=120)
    e.add("young", prompt(2, 190), max_tokens=120)
    preempted = False
    for _ in range(400):
        if not e.scheduler.has_requests():
            break
        e.step()
        preempted = preempted or any(r.num_preemptions for r in e.scheduler.requests.values())
        if preempted:
            for task in e.all_tasks():
                task.run()
                task.finish()
    assert preempted
    assert set(e.finished) == {"old", "young"}
    _settle(e)
    # What is there is right: an engine that loads it checks every byte.
    manual.auto = True
    for seed in (1, 2):
        check = engine()
        check.generate(f"check{seed}", prompt(seed, 190))
        # What was given up at the preemption was saved when it was computed again.
        assert check.counted["hit_tokens"] == 128
    if not copied_in_time:
        assert e.counted["save_failed_blocks|timeout"] > 0


def test_no_load_while_a_save_of_the_same_request_is_open(engine, manual: World) -> None:
    """B14: preempted with a pending save, readmitted, the lookup hits: later, never both at once."""
    e = engine()
    tokens = prompt(1, 200)
    _seeded(manual, engine, tokens[:128])
    e = engine()
    request = e.add("a", tokens, max_tokens=40)
    while not e.worker.pending()["saves"]:
        e.step()
        for task in e.all_tasks():
            if task.kind == "load":
                task.run()
    assert e.scheduler.requests["a"].num_computed_tokens >= 192
    e.scheduler.running.remove(request)
    e.scheduler._preempt_request(request, 0.0)
    # The scheduler side has not heard of the copy yet, so a hit may not be used.
    assert e.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    e.scheduler.kv_cache_manager.reset_prefix_cache()
    for _ in range(20):
        e.step()
        open_saves = e.connector._sched.tracker.open_saves("a")
        assert not (open_saves and e.worker.pending()["loads"])
        for task in e.all_tasks():
            task.run()
            task.finish()
    e.run()
    assert e.counted["hit_tokens"] >= 128 + 192
    assert e.pending() == {}


def test_preempted_while_waiting_for_blocks_comes_back_with_a_hit(engine, world: World) -> None:
    e = engine(blocks=16, max_num_seqs=3)
    for i in range(3):
        e.add(f"r{i}", prompt(i, 130), max_tokens=100)
    e.run(2000)
    assert len(e.finished) == 3
    _settle(e)


def test_failed_submission_is_counted_and_the_engine_goes_on(
    engine, world: World, monkeypatch
) -> None:
    from ucm_core.errors import FullError

    e = engine()

    def refuse(*a: object, **k: object) -> None:
        raise FullError("the queue is full")

    monkeypatch.setattr(e.store, "dump", refuse)
    e.generate("a", prompt(1, 200))
    assert e.counted["save_failed_blocks|rejected"] == 3
    assert e.pending() == {}


def test_reset_of_running_requests_under_open_saves(engine, manual: World) -> None:
    """Preempted and resumed in one step: the old pages are given up, nothing is told twice."""
    e = engine()
    e.add("a", prompt(1, 200), max_tokens=20)
    e.step()
    e.step()
    assert e.worker.pending()["saves"] == 1
    e.scheduler.reset_prefix_cache(reset_running_requests=True)
    e.step()
    _settle(e)
    assert "a" in e.finished


def test_reset_of_running_requests_that_the_store_can_serve(engine, world: World) -> None:
    """vLLM asks for a hit before it tells the preemption: the hit is taken, nothing raises."""
    e = engine()
    e.add("a", prompt(1, 200), max_tokens=20)
    e.step()
    e.step()
    assert e.worker.pending()["saves"] == 0
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    e.run()
    assert e.counted["hit_tokens"] == 192
    _settle(e)


def test_late_results_of_a_load_that_timed_out(engine, manual: World) -> None:
    tokens = prompt(1, 200)
    _seeded(manual, engine, tokens)
    e = engine()
    e.add("a", tokens)
    e.step()
    (task,) = e.all_tasks()
    task.results[:] = Status.TIMEOUT
    _settle(e)
    assert "a" in e.finished
    assert e.counted["load_failed_blocks|timeout"] == 3
    _settle(e)


def test_only_idle_steps_wait_for_a_load_and_only_a_moment(engine, manual: World) -> None:
    """An engine with nothing else to do must not spin; one that computes must not be held up."""
    tokens = prompt(1, 200)
    _seeded(manual, engine, tokens)
    e = engine()
    store = e.store
    e.add("a", tokens, max_tokens=1)
    e.step()
    e.step()
    assert store.patience, "an empty step went on at once"
    assert max(store.patience) <= IDLE_WAIT_S <= 0.004
    e.add("b", prompt(2, 200), max_tokens=4)
    store.patience.clear()
    e.step()
    e.step()
    assert store.patience == [], "a step that computes waited for another request's load"
    _settle(e)
