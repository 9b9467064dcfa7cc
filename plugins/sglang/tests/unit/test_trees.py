"""SGLang's own tree and storage threads over our backend: full, sliding and recurrent pools, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.utils import get_hash_str
from tiny_models import ensure_model

from engine_harness.tamper import delete, flip_byte, objects
from trees import FULL, SLIDING, STATES, Tree, model_of_kit
from ucm_sglang.keys import links_of

KINDS = {"full": FULL, "sliding": SLIDING, "states": STATES}


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Servers over one directory. Their model is what SGLang's fixtures make: not the checkpoint's."""
    trees: list[Tree] = []

    def make(kind: str, **how: Any) -> Tree:
        with pytest.MonkeyPatch.context() as patch:
            model_of_kit(KINDS[kind], patch)
            trees.append(Tree(KINDS[kind], tmp_path / "kv", ensure_model("llama"), **how))
        return trees[-1]

    yield make
    for one in trees:
        one.close()


def equal(left: dict[str, Any], right: dict[str, Any]) -> dict[str, bool]:
    assert left.keys() == right.keys()
    return {name: torch.equal(left[name], right[name]) for name in left}


@pytest.mark.parametrize("kind", KINDS)
def test_restored_bit_for_bit(tree: Callable[..., Tree], kind: str) -> None:
    first = tree(kind)
    tokens = first.prompt(6)
    leaf = first.compute(tokens)
    wanted = first.content(leaf)
    first.save(leaf)
    second = tree(kind)
    restored, node = second.serve(tokens)
    assert restored == len(tokens)
    assert all(equal(second.content(node), wanted).values())
    counters = second.backend.counters()
    assert counters["load_pages"] > 0
    assert not [name for name in counters if "failed" in name or "failures" in name]


@pytest.mark.parametrize("kind", ["sliding", "states"])
def test_without_its_window_or_state_nothing_is_restored(
    tree: Callable[..., Tree], kind: str
) -> None:
    """B08: pages of KV alone are no hit."""
    first = tree(kind)
    tokens = first.prompt(6)
    first.save(first.compute(tokens))
    lane = first.backend._deployment.lanes["swa" if kind == "sliding" else "mamba"]
    names = get_hash_str(tokens, None, page_size=first.config.page_size)
    ids = {bytes(i).hex() for batch in lane._ids(links_of(names)) for i in batch}
    gone = [path for path in objects(first.root) if path.name in ids]
    assert gone
    for path in gone:
        delete(path)
    restored, _ = tree(kind).serve(tokens)
    assert restored == 0


@pytest.mark.parametrize("kind", KINDS)
def test_everything_damaged_is_nothing_restored(tree: Callable[..., Tree], kind: str) -> None:
    first = tree(kind)
    tokens = first.prompt(6)
    first.save(first.compute(tokens))
    for path in objects(first.root):
        flip_byte(path)
    second = tree(kind)
    restored, _ = second.serve(tokens)
    assert restored == 0
    assert second.backend.counters()["load_failed_pages|corrupt"] > 0


def test_a_shorter_prompt_and_a_longer_one(tree: Callable[..., Tree]) -> None:
    first = tree("full")
    tokens = first.prompt(6)
    first.save(first.compute(tokens))
    assert tree("full").serve(tokens[: 3 * 16])[0] == 3 * 16
    assert tree("full").serve([*tokens, *range(40)])[0] == len(tokens)


def test_every_legal_length_is_listed(tree: Callable[..., Tree]) -> None:
    """Ranks intersect the lists: the greatest length alone would not do."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    one = tree("states")
    backend = one.backend
    names = get_hash_str(list(range(8 * 4)), None, page_size=4)
    kv, states = backend._pools["kv"], backend._pools["mamba"]
    pages = kv.alloc(8 * 4)
    assert backend.batch_set_v2(
        [PoolTransfer(name=PoolName.KV, keys=names, host_indices=pages)]
    ) == {PoolName.KV: [True] * 8}
    slots = states.alloc(2)
    at = [names[2], names[5]]
    done = backend.batch_set_v2([PoolTransfer(name=PoolName.MAMBA, keys=at, host_indices=slots)])
    assert done == {PoolName.MAMBA: [True, True]}
    wanted = PoolTransfer(name=PoolName.MAMBA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(names, [wanted])
    assert found.restorable_prefix_pages == [3, 6]
    assert found.kv_hit_pages == 6
    assert found.extra_pool_hit_pages == {"kv": 8, "mamba": 6}
