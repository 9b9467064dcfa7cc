"""Requests for tests: prompts that share prefixes, and runs without a cache to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ucm_reference import Engine, Limits, LockstepExecutor, Model, Request, Sizes, Topology
from ucm_reference.drafts import Drafter

#: Per request: tokens, and digests of the exact activations behind each of them.
Result = dict[str, tuple[list[int], list[str]]]


def requests(
    model: Model, count: int, shortest: int, longest: int, *, output: int = 6, seed: int = 0
) -> list[Request]:
    """Prompts that share leading parts of one of two texts; media differs between some of them."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, model.vocabulary, (2, longest)).tolist()
    made = []
    for i in range(count):
        length = int(rng.integers(shortest, longest))
        shared = int(rng.integers(length // 2, length))
        tail = rng.integers(0, model.vocabulary, length - shared).tolist()
        prompt = texts[i % 2][:shared] + tail
        made.append(Request(f"r{i}", prompt, output, media=i % 2))
    return made


def results(done: Sequence[Request]) -> Result:
    return {r.request_id: (r.output, r.digests) for r in done}


def run(
    model: Model,
    given: Sequence[Request],
    topology: Topology | None = None,
    *,
    sizes: Sizes | None = None,
    limits: Limits | None = None,
    drafter: Drafter | None = None,
) -> tuple[Result, Engine]:
    """A run without a cache, freed memory poisoned. The engine comes back closed."""
    sizes = sizes or Sizes()
    executor = LockstepExecutor(
        model,
        topology or Topology(),
        sizes,
        poison=True,
        short=1 if drafter is None else drafter.limit + 1,
    )
    options: dict[str, Any] = {"sizes": sizes, "limits": limits, "drafter": drafter}
    with Engine(model, executor, **options) as engine:
        done = engine.run(given)
    return results(done), engine


def differences(found: Result, expected: Mapping[str, Any]) -> list[str]:
    """Requests whose tokens or activations differ."""
    assert found.keys() == expected.keys()
    return [name for name in expected if found[name] != expected[name]]
