"""Names per model part, ghosts, state blocks, elected writers and completion per segment."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ucm_core.adapter.names import layer_number, resolve_names, without_ghosts
from ucm_core.adapter.owners import Completion, segment_owner, writer_of
from ucm_core.adapter.states import StateAt, boundary_states
from ucm_core.adapter.unit_map import LayerKey
from ucm_core.errors import ConfigError
from ucm_core.spec import TARGET, Kind, LayerSpec, SpecTable


def test_layer_numbers() -> None:
    assert layer_number("model.layers.3.self_attn.attn") == 3
    assert layer_number("transformer.h.12") == 12
    for bad in ("model.embed", "model.layers.3.experts.7.attn"):
        with pytest.raises(ConfigError, match="numbers among its dotted words"):
            layer_number(bad)


def test_a_draft_layer_never_collides_with_a_target_layer() -> None:
    """The same name in two model objects, and a draft layer numbered on after the target's."""
    target = [f"model.layers.{i}.attn" for i in range(3)]
    same = resolve_names({TARGET: target, "draft": ["model.layers.0.attn"]}, 3)
    assert same["draft"]["model.layers.0.attn"] == LayerKey("draft", 0)
    assert same[TARGET]["model.layers.0.attn"] == LayerKey(TARGET, 0)
    on = resolve_names({TARGET: target, "draft": ["model.layers.3.mtp.attn"]}, 3)
    assert on["draft"] == {"model.layers.3.mtp.attn": LayerKey("draft", 0)}


def test_twins_in_one_part_are_refused_but_sidecars_are_no_twins() -> None:
    with pytest.raises(ConfigError, match="both layer 0 of 'target'"):
        resolve_names({TARGET: ["model.layers.0.self.attn", "draft.layers.0.self.attn"]}, 1)
    both = ["model.layers.0.self.attn", "model.layers.0.self.indexer"]
    assert len(resolve_names({TARGET: both}, 1)[TARGET]) == 2


def indexer(i: int, **fields: object) -> LayerSpec:
    return LayerSpec(
        i,
        f"l{i}.idx",
        Kind.SIDECAR,
        132,
        role="indexer",
        follows=f"l{i}",
        **fields,  # type: ignore[arg-type]
    )


def test_ghost_indexers_are_stored_once() -> None:
    """Four layers show one indexer's bytes, another has its own: two sidecars remain, of 0 and 4."""
    layers = [LayerSpec(i, f"l{i}", Kind.CHAIN, 1152) for i in range(5)]
    layers += [indexer(i) for i in (3, 2, 1, 0, 4)]
    spans = {f"l{i}.idx": (4096, 1000) for i in range(4)} | {"l4.idx": (9000, 1000)}
    kept, ghosts = without_ghosts(layers, spans)
    assert ghosts == {f"l{i}.idx": "l0.idx" for i in (1, 2, 3)}
    table = SpecTable.from_layers(kept, grain=64)
    (sidecar,) = (r for r in table.rows if r.kind is Kind.SIDECAR)
    assert sidecar.layers == (0, 4)
    assert without_ghosts(layers, {}) == (layers, {})


def test_spans_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap in part"):
        without_ghosts([indexer(0), indexer(1)], {"l0.idx": (0, 100), "l1.idx": (64, 100)})
    other = LayerSpec(1, "l1.idx", Kind.SIDECAR, 64, follows="l1")
    with pytest.raises(ConfigError, match="differ in size"):
        without_ghosts([indexer(0), other], {"l0.idx": (0, 100), "l1.idx": (0, 100)})


def test_b09_one_snapshot_from_its_own_slot() -> None:
    """130 tokens, blocks of 64, [null, state at 128, running, three draft slots]."""
    null, s128, running, d = 0, 41, 42, 50
    blocks = [null, s128, running, d, d + 1, d + 2]
    assert boundary_states(blocks, 130, 64, draft_slots=3) == [StateAt(128, s128)]
    # a request at 127 tokens has no such state yet, whatever its list holds
    assert boundary_states(blocks, 127, 64, draft_slots=3) == []
    assert boundary_states([-1, s128], 130, 64) == [StateAt(128, s128)]
    assert boundary_states([7, s128], 128, 64) == [StateAt(64, 7), StateAt(128, s128)]


def test_b09_scratch_is_never_a_snapshot_wherever_it_ends_up() -> None:
    """Drafts make the list short of the boundary: tokens would allow it, the place is scratch."""
    for tokens, slots in itertools.product(range(400), (0, 1, 3)):
        n = tokens // 64 + 1 + slots
        blocks = [100 + i for i in range(n)]
        scratch = set(blocks[n - slots :]) if slots else set()
        running = blocks[tokens // 64]
        found = boundary_states(blocks, tokens, 64, draft_slots=slots)
        assert [s.position for s in found] == list(range(64, tokens + 1, 64))
        assert not {s.block for s in found} & (scratch | {running})
    assert boundary_states([1, 2, 3], 400, 64, draft_slots=3) == []
    for bad in ({"draft_slots": 4}, {"draft_slots": -1}):
        with pytest.raises(ValueError):
            boundary_states([1, 2, 3], 400, 64, **bad)


def test_b_union_with_takeover_by_enumeration() -> None:
    """4 ranks, each failing a save with p = 0.1: a block is lost only when all fail, 99.99 %."""
    saved = 0.0
    for outcome in itertools.product([True, False], repeat=4):
        weight = float(np.prod([0.9 if ok else 0.1 for ok in outcome]))
        tried = [int(writer_of(np.array([6]), 4, attempt)[0]) for attempt in range(4)]
        assert sorted(tried) == [0, 1, 2, 3] and tried[0] == 6 % 4
        saved += weight * any(outcome[rank] for rank in tried)
    assert saved == pytest.approx(0.9999)


def test_every_block_has_one_writer() -> None:
    blocks = np.arange(100)
    for ranks in (1, 2, 3, 8):
        counts = np.bincount(writer_of(blocks, ranks), minlength=ranks)
        assert counts.sum() == 100 and counts.max() - counts.min() <= 1
    with pytest.raises(ValueError):
        writer_of(blocks, 2, attempt=2)


def test_segments_of_a_sequence() -> None:
    blocks = np.arange(8)
    assert segment_owner(blocks, 3).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert segment_owner(blocks, 2, run=4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError):
        segment_owner(blocks, 0)


def test_completion_is_per_unit_segment_and_request() -> None:
    rng = random.Random(3)
    for _ in range(200):
        parts = [(unit, segment) for unit in ("a", "b", "c") for segment in range(3)]
        bad = {part for part in parts if rng.random() < 0.1}
        done = Completion()
        done.expect("r", parts)
        with pytest.raises(ValueError, match="open transfers"):
            done.expect("r", parts)
        rng.shuffle(parts)
        ends = []
        for n, (unit, segment) in enumerate(parts, 1):
            ends.append(done.settle("r", unit, segment, ok=(unit, segment) not in bad))
            assert not done.settle("r", unit, segment, ok=True)
            whole = {(unit, s) for s in range(3)}
            assert done.ready("r", unit) == (whole <= set(parts[:n]) and not whole & bad)
        assert ends == [False] * 8 + [True]
        assert done.close("r") == bad and len(done) == 0
        assert not done.settle("r", "a", 0, ok=True) and not done.ready("r", "a")


def test_a_request_that_is_closed_early_names_what_is_open() -> None:
    done = Completion()
    done.expect("r", [("a", 0), ("a", 1)])
    done.settle("r", "a", 0, ok=True)
    assert done.close("r") == {("a", 1)}
    assert done.close("r") == set()
