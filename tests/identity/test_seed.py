"""Seeds: each fact that changes bytes changes them, nothing else does (B05)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.identity import GroupFacts, ModelIdentity, encode
from ucm_core.identity.seed import runs

FACTS = GroupFacts("chain", heads=8, head_size=128, dtype="bf16", block_tokens=64)
MODEL = ModelIdentity("sampled:ab", "bf16", rope={"rope_theta": 10000.0, "factor": 2.0})


def seed(model: ModelIdentity = MODEL, facts: GroupFacts = FACTS, **at: Any) -> bytes:
    return model.group(facts, at.get("layers", range(4)), at.get("heads", (0, 8))).seed()


def test_b05_every_byte_changing_fact_changes_the_seed() -> None:
    changed = [
        seed(dataclasses.replace(MODEL, weights="sampled:ac")),
        seed(dataclasses.replace(MODEL, kv_dtype="fp8_e4m3")),
        seed(dataclasses.replace(MODEL, quantization="fp8")),
        seed(dataclasses.replace(MODEL, quantization="")),
        seed(dataclasses.replace(MODEL, rope={"rope_theta": 10000.0, "factor": 4.0})),
        seed(dataclasses.replace(MODEL, rope={"rope_theta": 10000.0})),
        seed(dataclasses.replace(MODEL, rope={"rope_theta": 10000.0, "factor": None})),
        seed(dataclasses.replace(MODEL, rope=None)),
        seed(MODEL.with_extra(softcap=30.0)),
        seed(MODEL.with_extra(softcap=None)),
        seed(MODEL.with_extra(softcap="")),
        *(
            seed(facts=dataclasses.replace(FACTS, **change))
            for change in (
                {"kind": "snapshot"},
                {"heads": 16},
                {"head_size": 64},
                {"dtype": "fp32"},
                {"block_tokens": 128},
                {"window": 1024},
                {"compression": 4},
                {"role": "indexer"},
                {"part": "draft"},
            )
        ),
        seed(layers=range(5)),
        seed(layers=range(1, 4)),
        seed(layers=[0, 1, 3]),
        seed(heads=(0, 4)),
        seed(heads=(4, 8)),
    ]
    assert len({seed(), *changed}) == 1 + len(changed)


def test_what_does_not_change_bytes_does_not_change_the_seed() -> None:
    assert seed(layers=[3, 2, 1, 0]) == seed()
    reordered = {"factor": 2, "rope_theta": 10000}  # other order, ints for floats
    assert seed(dataclasses.replace(MODEL, rope=reordered)) == seed()
    assert MODEL.with_extra(a=1).with_extra(a=1) == MODEL.with_extra(a=1)


def test_contradicting_extra_is_refused() -> None:
    with pytest.raises(ValueError, match="softcap"):
        MODEL.with_extra(softcap=30.0).with_extra(softcap=50.0)


@pytest.mark.parametrize("at", [{"layers": []}, {"heads": (4, 4)}, {"heads": (0, 9)}])
def test_impossible_coordinates_are_refused(at: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        seed(**at)


def test_runs() -> None:
    assert runs([5, 0, 1, 2, 9, 8]) == [[0, 3], [5, 6], [8, 10]]
    assert runs([]) == []


def test_encoding_by_hand() -> None:
    assert encode({"b": 1, "a": [True, None, ""]}) == (
        b"d\x02\0\0\0\0\0\0\0"
        b"s\x01\0\0\0\0\0\0\0a" + b"l\x03\0\0\0\0\0\0\0TNs\0\0\0\0\0\0\0\0"
        b"s\x01\0\0\0\0\0\0\0b" + b"i\x01\0\0\0\0\0\0\x001"
    )
    assert encode(-0.0) == encode(0.0) != encode(0)
    assert encode(1) != encode(1.0) != encode("1") != encode(b"1")
    assert encode(True) != encode(1)


@pytest.mark.parametrize("bad", [{1: 2}, {1, 2}, object(), 1j, {"a": {"b": {3}}}])
def test_unknown_types_are_refused_by_path(bad: Any) -> None:
    with pytest.raises(TypeError, match="value"):
        encode(bad)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"value\.a"):
        encode({"a": float("nan")})


leaves = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
)
values = st.recursive(leaves, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8)


def same(a: Any, b: Any) -> bool:
    """Equality in which True, 1 and 1.0 differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


@given(values, values)
def test_encoding_is_injective(a: Any, b: Any) -> None:
    assert (encode(a) == encode(b)) == same(a, b)
