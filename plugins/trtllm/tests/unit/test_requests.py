"""What a request's identity is made of, what is left alone, and what is promised of it."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prompts import SHARED, prompt, served
from stub_manager import StubRequest
from stub_memory import Shape
from stub_world import World

HASH = [1, -2, 3, 4, 5, 6, 7, 8]


def media(**changes: Any) -> dict[str, Any]:
    return {
        "multimodal_hashes": [HASH],
        "multimodal_positions": [70],
        "multimodal_lengths": [30],
        **changes,
    }


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, 256),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, 256),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {}, 0),
        ({}, {"cache_salt": ""}, 0),
        (media(), media(), 256),
        (media(), media(multimodal_hashes=[[9, *HASH[1:]]]), 64),
        (media(), media(multimodal_positions=[71]), 64),
        (media(), {}, 64),
        (media(), media(multimodal_hashes=None), 0),
        (media(multimodal_hashes=None), media(multimodal_hashes=None), 0),
        ({"lora_task_id": 3}, {"lora_task_id": 3}, 0),
        ({}, {"lora_task_id": 3}, 0),
        ({}, {"return_context_logits": True}, 0),
    ],
)
def test_identity(new_world: World, first: dict, second: dict, expected: int) -> None:
    assert served(new_world, first, second) == expected


def test_adapters_by_content(new_world: World, tmp_path: Path) -> None:
    def adapter(name: str, seed: int) -> str:
        folder = tmp_path / name
        folder.mkdir()
        data = np.random.default_rng(seed).bytes(4096)
        (folder / "adapter_model.bin").write_bytes(data)
        return str(folder)

    one, same, other = adapter("one", 1), adapter("same", 1), adapter("other", 2)

    def by(number: int, path: str) -> dict[str, Any]:
        return {"lora_task_id": number, "py_lora_path": path}

    assert served(new_world, by(1, one), by(2, same)) == 256
    assert served(new_world, by(1, one), by(1, other)) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_embedding_table": [1]},
        {"multimodal_embedding": [1]},
        {"input_tokens_extra_ids": [1, 2]},
        media(multimodal_hashes=[[1, 2]]),
        media(multimodal_positions=None),
        media(multimodal_lengths=[1, 2]),
    ],
)
def test_without_identity_nothing_is_stored(new_world: World, changes: dict) -> None:
    with new_world.engine() as engine:
        request = StubRequest(1, SHARED)
        for name, value in changes.items():
            setattr(request, name, value)
        engine.run(request)
    assert not new_world.files()


def test_matches_inside_a_block_are_declined_with_one_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.engine() as engine:
        engine.run(StubRequest(1, SHARED))
    with world.engine(partial=True) as engine, caplog.at_level(logging.WARNING):
        engine.run(StubRequest(2, SHARED[:70]))
        for number in (3, 4):
            request = StubRequest(number, SHARED + prompt(number, 9))
            engine.run(request)
            ((computed, given),) = request.matched
            assert computed % engine.shape.page_tokens and not given
    said = [r.message for r in caplog.records if "enable_partial_reuse" in r.message]
    assert len(said) == 1


def test_what_the_engine_has_is_not_loaded_again(world: World) -> None:
    """A local hit may end inside a stored block: nothing below it is written."""
    with world.engine() as engine:
        engine.run(StubRequest(1, SHARED))
    with world.engine(local_reuse=True) as engine:
        engine.run(StubRequest(2, SHARED[:80], max_new=1))
        request = StubRequest(3, SHARED + prompt(3, 9))
        engine.run(request)
        assert request.matched == [(80, 176)]


def test_short_prompts_are_left_alone(world: World) -> None:
    world.configure(persist_token_threshold=300)
    with world.engine() as engine:
        engine.run(StubRequest(1, SHARED))
    assert not world.files()


def test_lite_only_looks(world: World) -> None:
    assert served(world, {}, {}) == 256
    world.configure(use_lite=True)
    with world.engine() as engine:
        request = StubRequest(2, SHARED + [7])
        engine.run(request)
        assert request.matched == [(0, 0)]


@pytest.mark.parametrize("v2", [False, True])
def test_rejected_drafts_never_reach_the_store(new_world: World, v2: bool) -> None:
    """Drafts need pages, are rejected, and the pages go to others: what is stored is right all the same."""
    stream = random.Random(5)
    new_world.configure(block_tokens=16)
    shape = Shape(pages=160)
    with new_world.engine(
        shape, v2=v2, drafts=lambda: stream.randrange(8), local_reuse=False
    ) as engine:
        requests = [StubRequest(n, prompt(n, 30 + n), max_new=90) for n in range(1, 4)]
        engine.run(*requests)
    with new_world.engine(shape, v2=v2, local_reuse=False) as engine:
        again = [StubRequest(10 + r.request_id, r.tokens[:-1]) for r in requests]
        engine.run(*again)
        assert all(given >= 16 for request in again for _, given in request.matched)


def test_layer_groups_that_tell_by_number(new_world: World) -> None:
    """A later release tells pages as a mapping from layer group to list."""
    shape = Shape(layers=4, groups=((None, (0, 2)), (48, (1, 3))))
    with new_world.engine(shape, v2=True) as engine:
        told = engine.manager._data

        def by_number(request: Any, position: int, scheduled: int) -> Any:
            data = told(request, position, scheduled)
            data.new_block_ids_by_layer_group = dict(enumerate(data.new_block_ids_by_layer_group))
            return data

        engine.manager._data = by_number
        engine.run(StubRequest(1, SHARED))
    with new_world.engine(shape, v2=True) as engine:
        request = StubRequest(2, SHARED + [7])
        engine.run(request)
        assert request.matched == [(0, 256)]


def test_cancelled_promises_are_trimmed(new_world: World) -> None:
    """Later releases say what of an offer they will not take, before pages are given."""
    with new_world.engine() as engine:
        engine.run(StubRequest(1, SHARED))
    for start, end, begin, stop in ((128, 256, 0, 128), (0, 64, 64, 256), (0, 256, 256, 256)):
        with new_world.engine(v2=True) as engine:
            side = engine.manager.scheduler
            request = StubRequest(2, SHARED + [7])
            assert side.get_num_new_matched_tokens(request, 0)[0] == 256
            side.cancel_load(request, start, end)
            record = side._side._records[2]
            assert (record.begin, record.end) == (begin, stop)
            assert side.request_finished(request, []) is False
