"""Keys of the engine's block trees, against published vectors, and the bridge to our chain."""

from __future__ import annotations

import numpy as np
import pytest

from ucm_core.errors import UnsupportedError
from ucm_core.identity import ContentChain
from ucm_trtllm.tree_keys import TreeBridge, v1_key, v2_key, v2_root

TOKENS = list(range(1, 65))


def test_v2_keys_of_the_empty_scope() -> None:
    root = v2_root()
    first = v2_key(root, TOKENS[:32])
    assert root.hex().startswith("6e340b9cffb37a98")
    assert first.hex().startswith("0506d4c86a179754")
    assert v2_key(first, TOKENS[32:]).hex().startswith("6bd2550f03e19795")


def test_v2_scopes_differ() -> None:
    assert len({v2_root(), v2_root(1), v2_root(None, 1), v2_root(1, 1), v2_root(0)}) == 5


def test_v1_keys_are_the_chained_mix() -> None:
    """By hand for one token: the mix of 32 bits, folded into the length."""
    a = 5
    for _ in range(2):
        a = ((a >> 16) ^ a) * 0x45D9F3B % (1 << 32)
    a = (a >> 16) ^ a
    assert v1_key(0, [5]) == 1 ^ (a + 0x9E3779B9 + (1 << 6) + (1 >> 2))
    first = v1_key(0, TOKENS[:32])
    assert v1_key(first, TOKENS[32:]) != v1_key(0, TOKENS[32:])
    assert v1_key(0, TOKENS[:32], lora_id=7) != first
    assert 0 <= first < 1 << 64


@pytest.mark.parametrize("generation", [1, 2])
def test_bridge_maps_nodes_to_links(generation: int) -> None:
    """Pages of 32 in stored blocks of 64: every second node ends where a link does."""
    chain = ContentChain(64)
    bridge = TreeBridge(chain, 32, groups=(0, 3), generation=generation)
    tokens = list(range(1, 161))
    for step in range(0, 160, 40):  # as they come, in pieces that fit nothing
        more = tokens[step : step + 40]
        chain.extend(np.array(more, np.int64))
        bridge.extend(more)
    keys: list[bytes | int] = []
    key: bytes | int = v2_root() if generation == 2 else 0
    for at in range(0, 160, 32):
        block = tokens[at : at + 32]
        key = v2_key(key, block) if isinstance(key, bytes) else v1_key(key, block)
        keys.append(key)
    links = [chain.links[0].tobytes(), chain.links[1].tobytes()]
    for group in (0, 3):
        assert [bridge.link_of(k, group) for k in keys] == [None, links[0], None, links[1], None]
    assert bridge.link_of(keys[1], 1) is None


def test_salted_trees_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="salted"):
        TreeBridge(ContentChain(64), 32, salted=True)
