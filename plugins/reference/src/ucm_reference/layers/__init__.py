"""One module per way of mixing tokens; ``build`` makes the layer that a row asks for."""

from __future__ import annotations

from ucm_reference.layers.attention import FullAttention, LatentAttention
from ucm_reference.layers.base import Layer, Place
from ucm_reference.layers.compressed import CompressedAttention
from ucm_reference.layers.cross import CrossAttention
from ucm_reference.layers.delta import DeltaRule
from ucm_reference.layers.indexer import Indexer
from ucm_reference.layers.mamba import Mamba2

KINDS: dict[str, type[Layer]] = {
    "full": FullAttention,
    "shared": FullAttention,
    "latent": LatentAttention,
    "compressed": CompressedAttention,
    "indexer": Indexer,
    "cross": CrossAttention,
    "mamba2": Mamba2,
    "kda": DeltaRule,
    "gdn": DeltaRule,
}


def build(place: Place) -> Layer:
    """The layer of ``place``'s row."""
    return KINDS[place.row.kind](place)


__all__ = ["KINDS", "Layer", "Place", "build"]
