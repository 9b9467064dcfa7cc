"""SGLang's page keys are our links: no tokens are needed."""

from __future__ import annotations

import numpy as np
import pytest
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

from host_pools import keys
from ucm_core.identity import ContentChain, chain_root
from ucm_sglang.keys import links_of


def chain(tokens: list[int], page: int, root: bytes = b"") -> list[bytes]:
    made = ContentChain(page, root)
    made.extend(np.array(tokens, dtype=np.int64))
    return [bytes(link) for link in made.links]


@pytest.mark.parametrize("page", [16, 64])
def test_page_keys_are_links(page: int) -> None:
    tokens = list(range(3 * page))
    assert [bytes(link) for link in links_of(keys(3, page))] == chain(tokens, page)


def test_the_checked_vector() -> None:
    (link,) = links_of(get_hash_str(list(range(16)), None, page_size=16))
    assert bytes(link).hex().startswith("5d85718e")
    assert bytes(link).hex().endswith("70cea")


@pytest.mark.parametrize(
    ("extra", "salt"), [(None, "x"), ("adapter", None), ("adapter", "x"), ("", ""), (None, "")]
)
def test_salts_and_adapters_enter_the_first_predecessor(
    extra: str | None, salt: str | None
) -> None:
    """B04: the root of another engine's chain is SGLang's own."""
    tokens = list(range(32))
    seeded = get_hash_str(tokens, storage_namespace_seed(extra, salt), page_size=16)
    assert [bytes(link) for link in links_of(seeded)] == chain(tokens, 16, chain_root(extra, salt))


def test_long_token_ids() -> None:
    tokens = [2**32 + 5, *range(15)]
    assert [bytes(x) for x in links_of(get_hash_str(tokens, None, page_size=16))] == chain(
        tokens, 16
    )


def test_not_a_key() -> None:
    for wrong in ("", "ab", "g" * 64, "a" * 65):
        with pytest.raises(ValueError):
            links_of([wrong])
    with pytest.raises(ValueError, match="64 hex digits"):
        links_of(["a" * 63, "a" * 65])
