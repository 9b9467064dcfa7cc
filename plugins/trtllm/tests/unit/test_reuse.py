"""What one engine saved, another one is given: right bytes, hits counted by the engine."""

from __future__ import annotations

import pytest

from prompts import SHARED, prompt, warm_up
from stub_manager import StubRequest
from stub_memory import Shape
from stub_world import World


@pytest.mark.parametrize("loads", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_engine_continues_where_the_first_was(
    world: World, loads: str, ranks: int
) -> None:
    world.configure(promise_loads=loads)
    with world.engine(ranks=ranks) as engine:
        engine.run(StubRequest(1, SHARED + prompt(2, 20)))
        assert engine.external_tokens == 0
    with world.engine(ranks=ranks) as engine:
        warm_up(engine)
        second = StubRequest(2, SHARED + prompt(3, 30))
        engine.run(second)
        assert second.matched == [(0, 256)]
        assert engine.checked >= 256 * ranks


WINDOWED = Shape(layers=4, groups=((None, (0, 2)), (48, (1, 3))))
KINDS = {
    "plain": Shape(),
    "windows": WINDOWED,
    "one window": Shape(groups=((64, (0, 1)),)),
    "mla": Shape(latent=True, heads=1, head_size=8),
    "scales": Shape(scales=2, page_tokens=16),
    "long pages": Shape(page_tokens=32),
    "pages over blocks": Shape(page_tokens=128, pages=16),
    "bf16": Shape(dtype="bfloat16"),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_layer_groups(new_world: World, kind: str, ranks: int) -> None:
    """V2: regions, windows with their missing pages, MLA, block scales beside K and V."""
    shape = KINDS[kind]
    with new_world.engine(shape, v2=True, ranks=ranks) as engine:
        engine.run(StubRequest(1, SHARED + prompt(2, 20)))
    with new_world.engine(shape, v2=True, ranks=ranks) as engine:
        warm_up(engine)
        second = StubRequest(2, SHARED + prompt(3, 30), max_new=8)
        engine.run(second)
        assert second.matched == [(0, 256)]


def test_one_pool_and_layer_groups_share(new_world: World) -> None:
    """The same bytes, however the engine's generation describes them."""
    with new_world.engine() as engine:
        engine.run(StubRequest(1, SHARED + prompt(2, 20)))
    with new_world.engine(v2=True) as engine:
        second = StubRequest(2, SHARED + prompt(3, 30))
        engine.run(second)
        assert second.matched == [(0, 256)]


@pytest.mark.parametrize("v2", [False, True])
def test_a_token_is_always_left(new_world: World, v2: bool) -> None:
    with new_world.engine(v2=v2) as engine:
        engine.run(StubRequest(1, SHARED))
    for length, expected in ((64, 56), (65, 64), (63, 0), (128, 120), (256, 248)):
        with new_world.engine(v2=v2) as engine:
            request = StubRequest(2, SHARED[:length])
            engine.run(request)
            assert request.matched == [(0, expected)], length


def test_two_ranks_read_what_one_wrote(new_world: World) -> None:
    """Heads are stored in slices: a namespace of two serves one rank and two."""
    new_world.configure(namespace="shared", head_slices=2, block_tokens=64)
    for writer, reader in ((1, 2), (2, 1)):
        name = f"shared{writer}"
        new_world.configure(namespace=name, head_slices=2, block_tokens=64)
        with new_world.engine(ranks=writer) as engine:
            engine.run(StubRequest(1, SHARED))
        with new_world.engine(ranks=reader) as engine:
            warm_up(engine)
            second = StubRequest(2, SHARED + [5])
            engine.run(second)
            assert second.matched == [(0, 256)]
