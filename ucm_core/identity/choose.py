"""Which namespace an engine uses when its operator named none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ucm_core.identity.manifest import DEFAULT_BLOCK_TOKENS, DEFAULT_NAME, Manifest
from ucm_core.identity.namespace import open_namespace


def choose_namespace(
    roots: Sequence[Path],
    name: str | None = None,
    *,
    block_tokens: int | None = None,
    head_slices: int | None = None,
    fitting_tokens: int = DEFAULT_BLOCK_TOKENS,
    fitting_slices: int = 1,
) -> Manifest:
    """Open the namespace ``name`` below ``roots``, or one that fits when that is None.

    ``block_tokens`` and ``head_slices`` are the operator's; ``fitting_*`` what the engine can best work
    with. A named namespace keeps what its first writer chose. Unnamed ones carry what is not the default
    in their name (``default-b128-h2``): the start of one engine never fails because an earlier one chose
    differently. Without ``roots`` (a pipeline that keeps nothing) there is no manifest to write.
    """
    if name is not None and roots:
        return open_namespace(
            roots,
            name,
            block_tokens=block_tokens,
            head_slices=head_slices,
            first_block_tokens=fitting_tokens,
            first_head_slices=fitting_slices,
        )
    tokens, slices = block_tokens or fitting_tokens, head_slices or fitting_slices
    chosen = name or DEFAULT_NAME
    if tokens != DEFAULT_BLOCK_TOKENS:
        chosen += f"-b{tokens}"
    if slices != 1:
        chosen += f"-h{slices}"
    if not roots:
        return Manifest(chosen, tokens, slices)
    return open_namespace(roots, chosen, block_tokens=tokens, head_slices=slices)
