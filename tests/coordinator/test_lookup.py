"""From chains to ids and from answers to votes: one batch per store, nothing asked twice."""

from __future__ import annotations

import numpy as np
import pytest

from ucm_core.coordinator import LookupPlan, grid_positions, plan_lookup, resolve_hit
from ucm_core.identity import ContentChain, ModelIdentity, chain_root
from ucm_core.spec import KeySpace, Kind, SpecTable

from .tables import UNION, chain, state, table

MODEL = ModelIdentity("id:w", "bf16")
ROWS = table(
    chain("kv", 32, heads=8),
    chain("mla", 16, rank_rule=UNION),
    chain("swa", 16, window=32, store="mla"),
    state("s", 16, heads=4),
    {"name": "idx", "kind": Kind.SIDECAR, "follows": "mla", "block_tokens": 16, "unit": "follower"},
    grain=16,
)
KEYS = KeySpace(ROWS, MODEL, slices=2)


class Store:
    """A set of ids that counts the calls."""

    def __init__(self) -> None:
        self.ids: set[bytes] = set()
        self.calls = 0

    def put(self, ids: np.ndarray) -> None:
        self.ids |= {row.tobytes() for row in ids}

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        self.calls += 1
        return np.array([row.tobytes() in self.ids for row in ids], np.bool_)


def request(tokens: range, root: bytes = b"") -> ContentChain:
    made = ContentChain(16, root)
    made.extend(np.array(tokens, np.uint32))
    return made


def ask(stores: dict[str, Store], plan: LookupPlan) -> dict[str, np.ndarray]:
    return {name: stores[name].lookup(ids) for name, ids in plan.ids.items()}


def saved(chain_: ContentChain) -> dict[str, Store]:
    """Stores holding everything of ``chain_``: chain blocks and grid checkpoints."""
    plan = plan_lookup(KEYS, chain_)
    stores = {name: Store() for name in plan.ids}
    for name, ids in plan.ids.items():
        stores[name].put(ids)
    return stores


def resolve(stores: dict[str, Store], chain_: ContentChain, **options: int) -> tuple[int, int]:
    votes = plan_lookup(KEYS, chain_).votes(ask(stores, plan_lookup(KEYS, chain_)))
    plan = resolve_hit(ROWS, chain_.tokens, votes.present, votes.checkpoints, **options)
    return plan.l, plan.p_star


def test_one_batch_per_store_and_every_coordinate_once() -> None:
    chain_ = request(range(100))
    plan = plan_lookup(KEYS, chain_)
    # kv: 3 blocks x 2 slices; mla: 6 and the window's 6 share a store; s: 6 positions x 2 slices
    assert {name: len(ids) for name, ids in plan.ids.items()} == {"kv": 6, "mla": 12, "s": 12}
    everything = np.concatenate(list(plan.ids.values()))
    assert len({row.tobytes() for row in everything}) == len(everything)
    stores = saved(chain_)
    resolve(stores, chain_)
    assert all(store.calls == 1 for store in stores.values())


def test_same_prefix_hits_other_prefix_misses() -> None:
    stores = saved(request(range(100)))
    assert resolve(stores, request(range(100))) == (96, 96)
    assert resolve(stores, request(range(96))) == (96, 80)  # a token is left to compute
    assert resolve(stores, request(range(90))) == (64, 64)
    assert resolve(stores, request(range(1, 101))) == (0, 0)
    assert resolve(stores, request(range(100), chain_root(cache_salt="x"))) == (0, 0)


def test_right_position_other_prefix_is_a_miss() -> None:
    """The chain's blocks are there for both; the checkpoint only for the other prefix."""
    mine, other = request(range(100)), request(range(1, 101))
    stores = saved(mine)
    stores["s"] = saved(other)["s"]
    assert resolve(stores, mine) == (96, 0)


@pytest.mark.parametrize("store", ["kv", "s"])
def test_one_missing_slice_of_split_heads_is_a_miss(store: str) -> None:
    chain_ = request(range(100))
    stores = saved(chain_)
    ids = plan_lookup(KEYS, chain_).ids[store]
    stores[store].ids.discard(ids[-1].tobytes())  # the second slice's last
    assert resolve(stores, chain_) == ((64, 64) if store == "kv" else (96, 80))


def test_pp_stages_are_coordinates() -> None:
    rows = SpecTable.from_layers(
        [
            *(_layer(i, heads=1, rank_rule=UNION) for i in range(4)),
        ],
        grain=16,
    )
    keys = KeySpace(rows, MODEL, stages={"target": [range(2), range(2, 4)]})
    chain_ = request(range(64))
    plan = plan_lookup(keys, chain_)
    (name,) = plan.ids
    answer = np.ones(8, np.bool_)
    answer[6] = False  # block 2 of the second stage
    votes = plan.votes({name: answer})
    assert votes.present[name].tolist() == [True, True, False, True]  # type: ignore[union-attr]
    # union over ranks: rank 1 has what rank 0 lost
    ranks = np.array([answer, ~answer])
    assert np.all(plan.votes({name: ranks}).present[name])


def _layer(i: int, **fields: object) -> object:
    from ucm_core.spec import LayerSpec

    return LayerSpec(i, f"l{i}", Kind.CHAIN, entry_bytes=8, **fields)  # type: ignore[arg-type]


def test_skipping_what_the_engine_has() -> None:
    chain_ = request(range(200))
    plan = plan_lookup(KEYS, chain_, skip_tokens=50)
    full = plan_lookup(KEYS, chain_)
    assert np.array_equal(plan.ids["mla"][:9], full.ids["mla"][3:12])
    everything = {name: np.ones(len(ids), np.bool_) for name, ids in plan.ids.items()}
    votes = plan.votes(everything)
    assert votes.checkpoints["s"].min() == 64
    kept = resolve_hit(ROWS, 200, votes.present, votes.checkpoints, local=50)
    assert kept.p_star == 192
    # what was not asked for is not taken for stored
    assert resolve_hit(ROWS, 200, votes.present, votes.checkpoints, local=0).p_star == 0


def test_prefix_answers_for_a_plain_model() -> None:
    rows = table(chain("kv", 16, rank_rule=UNION), grain=16)
    keys = KeySpace(rows, MODEL)
    chain_ = request(range(200))
    plan = plan_lookup(keys, chain_, skip_tokens=32)
    assert plan.is_prefix("kv")
    for count, local, expected in ((3, 32, 80), (0, 32, 32), (3, 0, 0), (10, 40, 192)):
        votes = plan.votes({"kv": count})
        assert resolve_hit(rows, 200, votes.present, local=local).p_star == expected
    with pytest.raises(ValueError, match="count"):
        plan_lookup(KEYS, chain_).votes({"kv": 3, "mla": 3, "s": 3})


def test_grid_positions() -> None:
    assert ROWS.snapshot_grid == 16
    assert grid_positions(16, 64).tolist() == [16, 32, 48]
    assert grid_positions(16, 65, above=32).tolist() == [48, 64]
    assert grid_positions(64, 129).tolist() == [64, 128]


def test_grid_positions_of_a_long_prompt_are_bounded() -> None:
    """The deepest half one by one, the rest evenly thinned: multiples of a power of two of the grid."""
    found = grid_positions(64, 1_000_000, most=1024).tolist()
    assert len(found) <= 1024 and found == sorted(set(found))
    deepest = 999_999 // 64 * 64
    assert found[-512:] == list(range(deepest - 511 * 64, deepest + 1, 64))
    early = found[:-512]
    assert len(early) > 200 and early[0] == early[1] - early[0] == 64 * 32
    assert grid_positions(64, 1000, most=1024).tolist() == list(range(64, 1000, 64))
    # where checkpoints are made every 2048 tokens, the early half asks there and thinly elsewhere
    regular = grid_positions(64, 128_000, most=256, interval=2048).tolist()
    assert regular[-128:] == list(range(127_936 - 127 * 64, 127_937, 64))
    assert set(range(2048, 128_000 - 128 * 64, 2048)) <= set(regular[:-128])
    assert len(regular[:-128]) <= 128
    assert grid_positions(64, 1000, above=900, most=2).tolist() == [960]


def test_short_prompt_asks_nothing() -> None:
    plan = plan_lookup(KEYS, request(range(10)))
    assert all(len(ids) == 0 for ids in plan.ids.values())
    votes = plan.votes({name: np.zeros(0, np.bool_) for name in plan.ids})
    assert resolve_hit(ROWS, 10, votes.present, votes.checkpoints).p_star == 0
