"""Which of the states that vLLM offers are kept, and which stored ones the budget gives up again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripted_engine import STATE, ScriptedEngine, World, prompt
from ucm_core.adapter.retention import RetentionChoice
from ucm_core.coordinator.retention import Computation
from ucm_core.errors import ConfigError
from ucm_core.spec import SpecTable
from ucm_core.store.contract import Status
from ucm_vllm.startup import open_deployment

Build = Callable[..., ScriptedEngine]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, windows=(STATE, STATE, None))


@pytest.fixture
def hybrid(engine: Build, world: World) -> Build:
    """Chunks of 128 tokens: vLLM keeps a state at the end of each."""

    def build(**chosen: object) -> ScriptedEngine:
        world.settings["retention"] = RetentionChoice(**chosen)  # type: ignore[arg-type]
        return engine(block_size=64, max_num_batched_tokens=128, blocks=96)

    return build


def _states(e: ScriptedEngine, tokens: list[int]) -> list[int]:
    """Positions at which a state of this prefix is stored."""
    (place,) = e.connector._deployment.placement.states
    (at,) = e.connector._deployment.placement.keys.of(place.row.name)
    chain = e.chain_of(tokens)
    where = range(64, len(tokens) + 1, 64)
    ids = chain.snapshot_ids(at.seed, list(where))
    return [p for p, one in zip(where, ids, strict=True) if bytes(one) in e.world.objects]


def _known(e: ScriptedEngine) -> float:
    """The gauge of the checkpoint directory, as it was told last."""
    side = e.connector._scheduler
    assert side is not None
    assert side._retention is not None
    side.take_stats()
    return side._retention._counted["checkpoint_directory_entries"]


def test_without_options_everything_offered_is_kept(hybrid: Build) -> None:
    e, tokens = hybrid(), prompt(1, 700)
    e.generate("a", tokens)
    assert _states(e, tokens) == [128, 256, 384, 512, 640]
    assert e.counted.get("states_not_kept", 0) == 0
    assert _known(e) == 5


def test_the_interval_and_the_end_are_kept(hybrid: Build) -> None:
    e, tokens = hybrid(interval=256), prompt(1, 700)
    wanted = e.generate("a", tokens)
    assert _states(e, tokens) == [256, 512, 640]
    assert e.counted["states_not_kept"] == 2
    again = hybrid(interval=256)
    assert again.generate("b", tokens) == wanted
    assert again.counted["hit_tokens"] == 640


def test_a_shared_boundary_is_kept_from_its_second_appearance_on(hybrid: Build) -> None:
    """The first two prompts that share 384 tokens compute them; the third continues there."""
    e, shared = hybrid(interval=1 << 20), prompt(2, 390)
    for i, tail in enumerate((3, 4)):
        e.generate(f"r{i}", [*shared, *prompt(tail, 200)])
        e.scheduler.reset_prefix_cache()  # else vLLM itself would serve the second one
    assert _states(e, [*shared, *prompt(3, 200)]) == [384, 576]
    later = hybrid(interval=1 << 20)
    later.generate("c", [*shared, *prompt(5, 200)])
    assert later.counted["hit_tokens"] == 384


def test_a_budget_gives_up_what_is_used_least(hybrid: Build) -> None:
    one_state = 2 * 80  # two layers of 20 floats
    e = hybrid(budget_bytes=3 * one_state)
    loved, others = prompt(6, 140), [prompt(10 + i, 140) for i in range(5)]
    e.generate("loved", loved)
    for i, tokens in enumerate(others):
        e.generate(f"other{i}", tokens)
        e.scheduler.reset_prefix_cache()
        e.generate(f"again{i}", loved)
    deadline = time.monotonic() + 5.0  # removals are not waited for
    while sum(len(_states(e, t)) for t in (loved, *others)) > 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _states(e, loved) == [128]
    assert _states(e, others[0]) == [], "the budget gave up nothing"
    assert sum(len(_states(e, t)) for t in (loved, *others)) == 3
    assert e.counted["checkpoints_evicted"] == 3
    assert _known(e) == 3


def test_a_state_that_is_gone_leaves_the_directory(hybrid: Build, world: World) -> None:
    e, tokens = hybrid(), prompt(7, 140)
    wanted = e.generate("a", tokens)
    (place,) = e.connector._deployment.placement.states
    (at,) = e.connector._deployment.placement.keys.of(place.row.name)
    world.faults[bytes(e.chain_of(tokens).snapshot_ids(at.seed, [128])[0])] = Status.MISS
    e.scheduler.reset_prefix_cache()
    assert e.generate("b", tokens) == wanted
    assert e.counted["checkpoints_missed"] == 1
    assert e.counted.get("states_not_kept", 0) == 0, "what did not arrive is to be stored anew"


class _Half:
    """A rule of somebody's plugin: one state, in the middle."""

    def positions(self, table: SpecTable, work: Computation) -> np.ndarray:
        return np.array([work.tokens // 2 // table.checkpoint_grid * table.checkpoint_grid])


def test_another_rule_decides_instead(hybrid: Build) -> None:
    e, tokens = hybrid(policy=_Half()), prompt(8, 700)
    e.generate("a", tokens)
    assert _states(e, tokens) == []  # 320 is not where a chunk ends: a rule cannot conjure states
    tokens = prompt(9, 512)
    e.generate("b", tokens)
    assert _states(e, tokens) == [256]


def test_an_unknown_rule_is_refused_at_start(engine: Build, world: World) -> None:
    e = engine(block_size=64)
    e.config.kv_transfer_config.kv_connector_extra_config = {"retention_rule": "newest"}
    with pytest.raises(ConfigError, match="retention_rule .*unknown retention 'newest'"):
        open_deployment(e.config, e.kv, "scheduler")
