"""Layer kinds against plain loops in Python integers, and the memory they depend on."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from ucm_reference import MODELS, Engine, Limits, LockstepExecutor, Request, Sizes, Topology
from ucm_reference.fixed import _WEIGHTS, attend, normalise, requantise
from ucm_reference.layers.delta import _scan as delta_scan
from ucm_reference.layers.mamba import _scan as mamba_scan


@pytest.mark.parametrize("keys", [1, 7, 600, 3000])
def test_attention_is_exact(keys: int) -> None:
    """Against rational arithmetic, one key after the other; sums above 2**24 included."""
    rng = np.random.default_rng(keys)
    q, k, v = (rng.integers(-127, 128, (n, 4)).astype(np.float32) for n in (1, keys, keys))
    seen = rng.random(keys) < 0.8
    seen[0] = True
    bias = np.where(seen, np.float32(0), np.float32(-np.inf))
    found = attend(q[None, None], k[None], v[None], bias, 4)[0, 0, 0]
    scores = [int(q[0] @ key) for key in k]
    best = max(s for s, ok in zip(scores, seen, strict=True) if ok)
    weights = [
        int(_WEIGHTS[min(255, math.floor((best - s) / 16))]) if ok else 0
        for s, ok in zip(scores, seen, strict=True)
    ]
    for column in range(4):
        exact = Fraction(sum(w * int(x) for w, x in zip(weights, v[:, column], strict=True)))
        assert found[column] == round(float(exact / sum(weights)))


def test_order_and_company_do_not_matter() -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(-127, 128, (2, 1, 5, 8)).astype(np.float32)
    k, v = (rng.integers(-127, 128, (2, 700, 8)).astype(np.float32) for _ in range(2))
    whole = attend(q, k, v, np.zeros(1, np.float32), 6)
    order = rng.permutation(700)
    assert np.array_equal(attend(q, k[:, order], v[:, order], np.zeros(1, np.float32), 6), whole)
    alone = attend(q[1:, :, 2:3], k[1:], v[1:], np.zeros(1, np.float32), 6)
    assert np.array_equal(alone[0, 0, 0], whole[1, 0, 2])


def test_activations_are_integers_within_bounds() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.integers(-(2**19), 2**19, (50, 32)).astype(np.float64)
    made = normalise(hidden)
    assert np.array_equal(made, np.rint(made)) and np.abs(made).max() <= 127
    assert abs(float(np.sqrt((made**2).mean())) - 32) < 1
    assert requantise(np.array([20.0, -20.0, 5000.0]), 3).tolist() == [2, -2, 127]


def test_mamba_scan_token_by_token() -> None:
    rng = np.random.default_rng(1)
    decay = (rng.integers(192, 256, (2, 9, 3)) / 256).astype(np.float32)
    update = rng.integers(-16129, 16129, (2, 9, 3, 8, 4)).astype(np.float32)
    state = rng.integers(-1000, 1000, (2, 3, 8, 4)).astype(np.float32)
    whole = mamba_scan(state, decay, update)
    first = mamba_scan(state, decay[:, :4], update[:, :4])
    second = mamba_scan(first[-1], decay[:, 4:], update[:, 4:])
    assert np.array_equal(np.concatenate([first, second]), whole)
    at = (1, 2, 5, 3)
    value = int(state[at])
    for t in range(9):
        value = math.floor(Fraction(value) * Fraction(float(decay[1, t, 2]))) + int(
            update[1, t, 2, 5, 3]
        )
        assert whole[t][at] == value


def test_delta_rule_token_by_token() -> None:
    """The state moves towards the value that a key should give, and forgets by its decay."""
    rng = np.random.default_rng(2)
    k = normalise(rng.integers(-100, 100, (1, 6, 1, 8)).astype(np.float64)).astype(np.float64)
    v = rng.integers(-127, 128, (1, 6, 1, 8)).astype(np.float64) * 256
    decay = np.full((1, 6, 1, 8), 255 / 256)
    beta = np.full((1, 6, 1, 1), 0.75)
    whole = delta_scan(np.zeros((1, 1, 8, 8)), k, v, decay, beta)
    state = [[0] * 8 for _ in range(8)]
    for t in range(6):
        state = [[math.floor(Fraction(s * 255, 256)) for s in line] for line in state]
        key = [int(x) for x in k[0, t, 0]]
        for column in range(8):
            read = sum(key[i] * state[i][column] for i in range(8))
            error = round(Fraction(3, 4) * (int(v[0, t, 0, column]) - read))
            for i in range(8):
                state[i][column] += round(Fraction(key[i] * error, 2**13))
        assert whole[t][0, 0].tolist() == state
    read = k[0, 5, 0] @ whole[5][0, 0]
    assert np.abs(read - v[0, 5, 0]).mean() < 0.5 * np.abs(v[0, 5, 0]).mean()


def test_answers_depend_on_every_group_of_every_rank() -> None:
    """Blocks changed places in one group on one rank after the prompt: the next token's activations differ.

    Otherwise a cache could load rubbish there and no test of ours would notice.
    """
    model = MODELS["x-hybrid-96"]
    sizes = Sizes(pages=32, slots=16)
    prompt = np.random.default_rng(4).integers(0, model.vocabulary, 200).tolist()
    topology = Topology(tp=2, pp=2)

    def digest(row: str | None, rank: int, stage: int) -> str:
        executor = LockstepExecutor(model, topology, sizes)
        limits = Limits(tokens=512)
        with Engine(model, executor, sizes=sizes, limits=limits) as engine:
            request = Request("r", prompt, 2)
            engine.scheduler.add(request)
            engine.step()
            if row is not None:
                place = topology.ranks()[stage * 2 + rank]
                for tensor in executor.stages[stage].memory.of_rank(place):
                    if tensor.row == row:
                        tensor.data[1:] = np.roll(tensor.data[1:], 1, axis=0)
            engine.drain()
        return request.digests[1]

    base = digest(None, 0, 0)
    rows = [row.name for row in model.rows if row.name != "cross"]
    for row in rows:
        for rank, stage in ((0, 0), (1, 1)):
            assert digest(row, rank, stage) != base, (row, rank, stage)
