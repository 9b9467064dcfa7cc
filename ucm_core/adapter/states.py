"""Which of a request's state blocks is a snapshot: never the running one, a draft slot or a null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ucm_core.adapter.blocks import NO_PAGE

#: The block id with which engines fill places that hold nothing; ``NO_PAGE`` means the same.
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class StateAt:
    """A finished state: the state after exactly ``position`` tokens, in the engine's block ``block``."""

    position: int
    block: int


def boundary_states(
    blocks: Sequence[int],
    tokens: int,
    block_tokens: int,
    *,
    draft_slots: int = 0,
    null: int = NULL_BLOCK,
) -> list[StateAt]:
    """The snapshots in the state blocks of a request that has computed ``tokens`` (confirmed) tokens.

    Place ``i`` of ``blocks`` belongs to tokens ``[i * block_tokens, (i + 1) * block_tokens)`` and holds
    the state at its end, once that is reached; the last ``draft_slots`` places are scratch of
    speculation, at whatever place they are. A place whose end is not reached holds the running state.
    "The last block" is therefore never the answer. Raises ValueError for impossible counts.
    """
    if draft_slots < 0 or block_tokens < 1 or tokens < 0:
        raise ValueError(f"tokens {tokens}, block {block_tokens}, draft slots {draft_slots}")
    if draft_slots > len(blocks):
        raise ValueError(f"{draft_slots} draft slots in a list of {len(blocks)} blocks")
    finished = min(tokens // block_tokens, len(blocks) - draft_slots)
    return [
        StateAt((i + 1) * block_tokens, blocks[i])
        for i in range(finished)
        if blocks[i] not in (null, NO_PAGE)
    ]
