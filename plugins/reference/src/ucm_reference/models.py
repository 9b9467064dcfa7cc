"""The models: data only."""

from __future__ import annotations

from ucm_reference.model import LayerRow, Model

X_HYBRID_96 = Model(
    "x-hybrid-96",
    (
        LayerRow("mla", "latent", 16, heads=1, width=24),
        LayerRow("csa_c16", "compressed", 16, heads=1, width=16, compression=16),
        LayerRow("swa", "full", 24, width=8, window=128),
        LayerRow("mamba2", "mamba2", 20, width=8, grid=64, interval=1024, together=5),
        LayerRow("kda", "kda", 8, width=8, grid=1, interval=1024),
        LayerRow("dsa_index", "indexer", 4, heads=1, width=8, top=96, follows="mla", store="index"),
        LayerRow("cross", "cross", 8, width=8),
    ),
)

MODELS = {
    model.name: model
    for model in (
        X_HYBRID_96,
        Model("gqa-4", (LayerRow("full", "full", 4, heads=2),)),
        Model("mla-4", (LayerRow("mla", "latent", 4, heads=1, width=24),)),
        Model(
            "shared-6",
            (LayerRow("full", "full", 2, heads=4), LayerRow("yoco", "shared", 4, follows="full")),
        ),
        Model(
            "windows-6",
            (
                LayerRow("full", "full", 2, heads=4),
                LayerRow("near", "full", 4, heads=4, window=96),
            ),
        ),
        Model(
            "deltanet-8",
            (
                LayerRow("full", "full", 2, heads=4),
                LayerRow("gdn", "gdn", 6, width=8, together=3),
            ),
        ),
    )
}
