"""The engine alone: what a token is depends on its prefix, and on nothing that schedules it."""

from __future__ import annotations

import functools
import time

import pytest

from ucm_reference import (
    MODELS,
    Engine,
    Limits,
    LockstepExecutor,
    Model,
    Request,
    Sizes,
    Topology,
)
from ucm_reference.drafts import RecordedDrafter
from workloads import Result, differences, requests, run

SMALL = [name for name in MODELS if len(MODELS[name].layers) < 20]
BIG = MODELS["x-hybrid-96"]


@functools.cache
def plain(name: str) -> Result:
    """One request at a time, one rank, the whole prompt at once: nothing shares anything."""
    model = MODELS[name]
    limits = Limits(tokens=2048, requests=1)
    return run(model, work(model), limits=limits)[0]


def work(model: Model) -> list[Request]:
    if model is BIG:
        return requests(model, 4, 100, 300)
    return requests(model, 8, 40, 220)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "topology",
    [
        Topology(),
        Topology(tp=4),
        Topology(pp=2),
        Topology(cp=2, segment=64),
        Topology(tp=2, cp=3, segment=32),
    ],
    ids=["tp1", "tp4", "pp2", "cp2", "tp2cp3"],
)
def test_chunks_batches_and_ranks_change_nothing(name: str, topology: Topology) -> None:
    model = MODELS[name]
    if name == "shared-6" and topology.pp == 2:
        topology = Topology(pp=2, cuts=(3, 3))
    found, engine = run(model, work(model), topology, limits=Limits(tokens=61, requests=5))
    assert differences(found, plain(name)) == []
    assert engine.scheduler.memory_in_use().keys()
    assert not any(engine.scheduler.memory_in_use().values())


@pytest.mark.parametrize("name", SMALL)
def test_preemption_changes_nothing(name: str) -> None:
    model = MODELS[name]
    given = work(model)
    found, engine = run(model, given, sizes=Sizes(pages=14), limits=Limits(tokens=40))
    assert engine.scheduler.preemptions > 0
    assert differences(found, plain(name)) == []
    assert not any(engine.scheduler.memory_in_use().values())


@pytest.mark.parametrize("name", SMALL)
def test_rejected_drafts_change_nothing(name: str) -> None:
    model = MODELS[name]
    answers = {key: tokens for key, (tokens, _) in plain(name).items()}
    found, engine = run(model, work(model), Topology(), drafter=RecordedDrafter(answers))
    assert engine.scheduler.accepted_drafts > 5
    assert engine.scheduler.rejected_drafts > 5
    assert differences(found, plain(name)) == []


@pytest.mark.parametrize(
    "topology", [Topology(tp=8, pp=2), Topology(tp=2, cp=2)], ids=["tp8pp2", "tp2cp2"]
)
def test_the_big_hybrid_over_ranks(topology: Topology) -> None:
    found, _ = run(BIG, work(BIG), topology, limits=Limits(tokens=190))
    assert differences(found, plain(BIG.name)) == []


def test_the_big_hybrid_with_drafts() -> None:
    answers = {key: tokens for key, (tokens, _) in plain(BIG.name).items()}
    found, engine = run(BIG, work(BIG), drafter=RecordedDrafter(answers))
    assert engine.scheduler.rejected_drafts > 2
    assert differences(found, plain(BIG.name)) == []


def test_abort_in_every_state_frees_everything() -> None:
    """Aborts after 0, 1, 2, ... steps: waiting, in the prompt, while decoding, after the end."""
    model = MODELS["windows-6"]
    expected = plain(model.name)
    for steps in range(6):
        given = work(model)[:3]
        sizes = Sizes()
        executor = LockstepExecutor(model, Topology(), sizes, poison=True)
        with Engine(model, executor, sizes=sizes, limits=Limits(tokens=100)) as engine:
            for request in given:
                engine.scheduler.add(request)
            for _ in range(steps):
                engine.step()
            engine.scheduler.abort("r1")
            engine.scheduler.abort("r1")
            engine.drain()
        assert not any(engine.scheduler.memory_in_use().values())
        for request in (given[0], given[2]):
            assert (request.output, request.digests) == expected[request.request_id]


def test_media_and_every_earlier_token_reach_the_answer() -> None:
    """Answers would hide a wrong cache if they did not depend on it."""
    prompt = work(BIG)[0].prompt

    def digest(tokens: list[int], media: int = 0) -> str:
        found, _ = run(BIG, [Request("r", tokens, 1, media=media)])
        return found["r"][1][0]

    base = digest(list(prompt))
    assert digest(list(prompt), media=5) != base
    changed = list(prompt)
    changed[3] ^= 1
    assert digest(changed) != base


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="heads do not spread over tp=3"):
        Topology(tp=3).check(BIG)
    with pytest.raises(ValueError, match="another pipeline stage"):
        Topology(pp=2, cuts=(1, 5)).stages(MODELS["shared-6"])
    with pytest.raises(ValueError, match="do not cut 96 layers"):
        Topology(pp=2, cuts=(40, 40)).stages(BIG)
    with pytest.raises(ValueError, match="longer than"):
        run(BIG, [Request("r", [1] * 9000, 1)])


def test_time_to_first_token_counts_from_add() -> None:
    request = Request("r", [1, 2, 3], 2)
    time.sleep(0.3)
    begin = time.perf_counter()
    run(MODELS["gqa-4"], [request])
    assert request.first_token_s is not None
    assert 0 < request.first_token_s <= time.perf_counter() - begin
