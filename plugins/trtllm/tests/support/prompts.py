"""Prompts, and the usual question: what does a second engine get of what a first one stored?"""

from __future__ import annotations

import random
from typing import Any

from stub_executor import StubExecutor
from stub_manager import StubRequest
from stub_world import World


def prompt(seed: int, tokens: int) -> list[int]:
    """The same for the same seed in every process."""
    stream = random.Random(seed)
    return [stream.randrange(3, 1000) for _ in range(tokens)]


SHARED = prompt(1, 256)


def warm_up(engine: StubExecutor) -> None:
    """Ranks find the verified blocks with their first message: before that nothing is promised."""
    engine.run(StubRequest(9_000, prompt(99, 10), max_new=1))


def served(world: World, first: dict[str, Any], second: dict[str, Any]) -> int:
    """Tokens given to a request that shares its prompt with one of an earlier engine; ``first`` and
    ``second``: what else the two requests have. Starts from an empty storage."""
    world.empty()
    with world.engine() as engine:
        engine.run(_request(1, SHARED, first))
    with world.engine() as engine:
        request = _request(2, SHARED + [7], second)
        engine.run(request)
        ((_, given),) = request.matched
        return given


def _request(number: int, tokens: list[int], more: dict[str, Any]) -> StubRequest:
    return StubRequest(number, tokens, **more)
