"""An attention layer as every engine's adapter declares it: equal layers must have equal names in ids."""

from __future__ import annotations

from ucm_core.spec.kinds import Kind, RankRule
from ucm_core.spec.layer import LayerSpec


def attention_layer(
    index: int,
    *,
    heads: int,
    head_size: int,
    entry_bytes: int,
    dtype: str,
    window: int | None = None,
    latent: bool = False,
) -> LayerSpec:
    """``heads``: kv heads over all ranks. ``head_size``: elements of K of a head; of a latent layer (MLA)
    the whole row, latent and rope part. ``entry_bytes``: bytes of a token, all heads, K and V. ``dtype``:
    canonical name (``"bf16"``). A latent layer is the same on all tensor-parallel ranks.
    """
    return LayerSpec(
        index=index,
        name=f"layers.{index}",
        kind=Kind.CHAIN,
        entry_bytes=entry_bytes,
        heads=heads,
        head_size=head_size,
        dtype=dtype,
        window=window,
        role="latent" if latent else "",
        rank_rule=RankRule.UNION if latent else RankRule.INTERSECTION,
    )
