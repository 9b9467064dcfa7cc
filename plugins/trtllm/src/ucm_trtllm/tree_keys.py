"""The engine's block-tree keys beside our chain: which node of its tree is which stored block.

The engine names a block in events and in ``RequestData.block_hashes`` by a key of its own tree. V2's key is
SHA-256 over the parent's key and the tokens; V1's is a chained mix of 64 bits, which with a salt starts from
a number the engine does not tell, so those are not reproducible. ``TreeBridge`` derives either from the same
tokens as our chain, so that what speaks of nodes (events, routers) can be told links, and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ucm_core.errors import UnsupportedError
from ucm_core.identity import ContentChain

_MASK = (1 << 64) - 1
_MIX_A, _MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def v2_root(lora_id: int | None = None, salt: int | None = None) -> bytes:
    """Key of the root of a reuse scope: a mask byte of what is there, then each as u64 LE."""
    scope = (lora_id, salt)
    mask = sum((value is not None) << at for at, value in enumerate(scope))
    given = b"".join(value.to_bytes(8, "little") for value in scope if value is not None)
    return hashlib.sha256(bytes([mask]) + given).digest()


def v2_key(parent: bytes, tokens: Sequence[int], token_bytes: int = 8) -> bytes:
    """Key of a block: ``SHA-256(parent || tokens)``, each token LE in ``token_bytes`` (later releases: 4)."""
    return hashlib.sha256(
        parent + b"".join(token.to_bytes(token_bytes, "little") for token in tokens)
    ).digest()


def v1_key(parent: int, tokens: Sequence[int], lora_id: int | None = None) -> int:
    """Key of a block without a salt or extra ids; ``parent`` is 0 for the first."""
    seed = (len(tokens) ^ (parent * _MIX_A & _MASK)) & _MASK
    for token in tokens:
        a = token & 0xFFFFFFFF
        a = ((a >> 16) ^ a) * 0x45D9F3B & 0xFFFFFFFF
        a = ((a >> 16) ^ a) * 0x45D9F3B & 0xFFFFFFFF
        seed = _folded(seed, (a >> 16) ^ a)
    if lora_id is not None:
        c = lora_id & _MASK
        c = (c ^ (c >> 30)) * _MIX_A & _MASK
        c = (c ^ (c >> 27)) * _MIX_B & _MASK
        seed = _folded(seed, c ^ (c >> 31))
    return seed


def _folded(seed: int, value: int) -> int:
    return seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2) & _MASK)


#: A node: its key, and the layer group (V2) or window (V1) whose tree it is in.
Node = tuple[bytes | int, int]


@dataclass
class TreeBridge:
    """Nodes of one request's prefix and the links of our chain that end where they do.

    ``page_tokens``: of the engine's blocks; a link ends at every ``chain.block_tokens``. A node that ends
    where no link does (pages that are smaller) maps to none. ``groups``: numbers of layer groups, or windows;
    all have the same key.
    """

    chain: ContentChain
    page_tokens: int
    groups: tuple[int, ...] = (0,)
    generation: int = 2
    salted: bool = False
    lora_id: int | None = None
    nodes: dict[Node, bytes] = field(default_factory=dict)
    _key: bytes | int = field(init=False, default=0)
    _pending: list[int] = field(init=False, default_factory=list)
    _blocks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.salted:
            raise UnsupportedError(
                "keys of a salted tree start from a number that the engine keeps to itself"
            )
        if self.generation == 2:
            self._key = v2_root(self.lora_id)

    def extend(self, tokens: Sequence[int]) -> None:
        """``tokens`` have been added to the chain as well."""
        self._pending += tokens
        size = self.page_tokens
        while len(self._pending) >= size:
            block, self._pending = self._pending[:size], self._pending[size:]
            if isinstance(self._key, bytes):
                self._key = v2_key(self._key, block)
            else:
                self._key = v1_key(self._key, block, self.lora_id)
            self._blocks += 1
            links, rest = divmod(self._blocks * size, self.chain.block_tokens)
            if not rest and links <= len(self.chain):
                link = self.chain.links[links - 1].tobytes()
                for group in self.groups:
                    self.nodes[self._key, group] = link

    def link_of(self, key: bytes | int, group: int = 0) -> bytes | None:
        """The link of a node; None: unknown, or no stored block ends there."""
        return self.nodes.get((key, group))
