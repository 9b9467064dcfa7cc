"""Conversations served with a cache by two engines in turn, and compared with a run without one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ucm_reference import MODELS, Limits, Model, Request, Sizes, Topology
from ucm_reference.cached import cached_engine
from ucm_reference.drafts import RecordedDrafter
from workloads import Result, differences, results, run


def conversations(model: Model, count: int, *, seed: int = 0, output: int = 4) -> list[Request]:
    """``count`` requests: five turns of each conversation, all behind one system prompt; one in three
    conversations has media. Turns of different conversations alternate."""
    rng = np.random.default_rng(seed)
    talks = -(-count // 5)
    system = rng.integers(0, model.vocabulary, 140).tolist()
    texts = [system + rng.integers(0, model.vocabulary, 200).tolist() for _ in range(talks)]
    made = []
    for turn in range(5):
        for talk, text in enumerate(texts):
            length = 145 + 40 * turn + int(rng.integers(0, 15))
            made.append(
                Request(f"talk{talk}.turn{turn}", text[:length], output, media=talk % 3 == 1)
            )
    return made[:count]


@functools.cache
def expected(name: str, count: int, seed: int = 0) -> Result:
    """Tokens and activations without a cache, on one rank."""
    model = MODELS[name]
    given = conversations(model, count, seed=seed)
    return run(model, given, limits=Limits(tokens=512))[0]


@dataclass
class Outcome:
    """What a campaign did, summed over its engines."""

    found: Result = field(default_factory=dict)
    hits: int = 0
    hit_tokens: int = 0
    states: int = 0
    failed_loads: int = 0
    preemptions: int = 0
    rejected: int = 0
    aborted: int = 0


def serve(
    folder: Path,
    name: str,
    count: int,
    topology: Topology,
    *,
    seed: int = 0,
    drafts: bool = False,
    processes: bool = False,
    aborts: Sequence[int] = (),
    use_layerwise: bool | str = "auto",
    **options: Any,
) -> Outcome:
    """A third of the requests by a first engine, the rest by a second one on the same directory.

    ``aborts``: numbers of requests that are aborted while others run; their answers are not compared.
    """
    model, outcome = MODELS[name], Outcome()
    given = conversations(model, count, seed=seed)
    answers = {key: tokens for key, (tokens, _) in expected(name, count, seed).items()}
    config = {
        "store_pipeline": "Posix",
        "storage_backends": str(folder),
        "staging_buffer_gb": "16 MiB",
        "use_layerwise": use_layerwise,
    }
    options.setdefault("sizes", Sizes(slots=128))
    for part in (given[: count // 3], given[count // 3 :]):
        drafter = RecordedDrafter(answers, seed=len(part)) if drafts else None
        with cached_engine(
            model,
            topology,
            options=config,
            drafter=drafter,
            poison=not processes,
            processes=processes,
            **options,
        ) as engine:
            for request in part:
                engine.scheduler.add(request)
            gone = [r for i, r in enumerate(given) if i in aborts and r in part]
            for request in gone:
                engine.step()
                engine.scheduler.abort(request.request_id)
            engine.drain()
            assert not any(engine.scheduler.memory_in_use().values())
            pending = engine.side.pending()
            assert pending["records"] == pending["tracked"] == pending["loads"] == 0
            assert pending["anomalies"] == 0
            outcome.hits += engine.side.stats.hit_requests
            outcome.hit_tokens += engine.side.stats.hit_tokens
            outcome.states += engine.side.stats.saved_states
            outcome.failed_loads += engine.side.stats.failed_loads
            outcome.preemptions += engine.scheduler.preemptions
            outcome.rejected += engine.scheduler.rejected_drafts
        kept = [r for r in part if r not in gone]
        outcome.aborted += len(gone)
        outcome.found.update(results(kept))
    return outcome


def compare(outcome: Outcome, name: str, count: int, seed: int = 0) -> list[str]:
    """Requests whose tokens or activations differ from the run without a cache."""
    wanted = expected(name, count, seed)
    return differences(outcome.found, {key: wanted[key] for key in outcome.found})


#: The five campaigns on the big hybrid, TP 8 and PP 2: name -> (topology, options).
CAMPAIGNS: dict[str, tuple[Topology, dict[str, Any]]] = {
    "plain": (Topology(tp=8, pp=2), {}),
    "speculation": (Topology(tp=8, pp=2), {"drafts": True}),
    "pp": (Topology(tp=8, pp=2, cuts=(53, 43)), {}),
    "cp": (Topology(tp=8, pp=2, cp=2), {}),
    "mixed": (
        Topology(tp=8, pp=2, cp=2),
        {
            "drafts": True,
            "aborts": (3, 7, 14, 22),
            "sizes": Sizes(pages=40, slots=128),
            "limits": Limits(tokens=100),
        },
    ),
}
