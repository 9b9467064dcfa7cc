"""What goes into a link beside its tokens: multimodal items and prompt embeddings.

An item enters the link of the *first* block it affects; every later link inherits it through the
chain. A request whose items have no digest is not cacheable: the adapter must not build a chain for
it (placeholder tokens alone would make two images look the same).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ucm_core.identity.encoding import Encodable, encode

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class ChainExtra:
    """One item of a prompt.

    ``position``: first token of the prompt (absolute) whose KV depends on it. ``length``: how many
    placeholder or embedded tokens it covers. ``kind``: ``"image"``, ``"audio"``, ``"video"``,
    ``"embeds"``, ... ``digest``: full hash of the content, as the engine or the adapter computed it
    (at least 16 bytes: a truncated hash makes other images equal).
    """

    position: int
    length: int
    kind: str
    digest: bytes

    def __post_init__(self) -> None:
        if self.position < 0 or self.length < 0:
            raise ValueError(
                f"extra {self.kind!r}: position {self.position} and length {self.length} "
                "must not be negative"
            )
        if len(self.digest) < 16:
            raise ValueError(
                f"extra {self.kind!r} at token {self.position}: a digest of {len(self.digest)} "
                "bytes is too short to tell contents apart; give the full content hash (>= 16 bytes)"
            )


def link_digest(extras: Sequence[ChainExtra]) -> bytes:
    """32 bytes over all items of one link: ``SHA-256("ucm/extras/1" || encode([[position, length,
    kind, digest], ...]))``, ascending by (position, kind, length, digest)."""
    ordered = sorted(extras, key=lambda e: (e.position, e.kind, e.length, e.digest))
    items: list[Encodable] = [[e.position, e.length, e.kind, e.digest] for e in ordered]
    return hashlib.sha256(b"ucm/extras/1" + encode(items)).digest()
