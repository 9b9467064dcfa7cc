"""Which rank holds what: pipeline stages, heads, and segments of the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from ucm_reference.model import PAGED, LayerRow, Model


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker of the deployment, by its place in each dimension."""

    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """``tp`` splits heads, ``pp`` layers (``stages``: uneven cuts as layer counts), ``cp`` the sequence.

    Under context parallelism the pages of tokens ``[i * segment, (i + 1) * segment)`` lie on rank
    ``i % cp``; states lie on all of them.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    segment: int = 128
    cuts: tuple[int, ...] = ()

    def stages(self, model: Model) -> tuple[range, ...]:
        """Layers of each pipeline stage. Raises ValueError for cuts that do not fit the model."""
        count = len(model.layers)
        cuts = self.cuts or tuple(count // self.pp + (i < count % self.pp) for i in range(self.pp))
        if len(cuts) != self.pp or sum(cuts) != count or min(cuts) < 1:
            raise ValueError(f"stages of {cuts} layers do not cut {count} layers into {self.pp}")
        ends = [sum(cuts[: i + 1]) for i in range(self.pp)]
        stages = tuple(range(end - n, end) for end, n in zip(ends, cuts, strict=True))
        for stage in stages:
            for layer in stage:
                if model.layers[layer].kind == "shared" and model.source_layer(layer) not in stage:
                    raise ValueError(
                        f"layer {layer} shares the cache of layer {model.source_layer(layer)}, "
                        "which lies in another pipeline stage; choose other cuts"
                    )
        return stages

    def ranks(self) -> list[Rank]:
        return [
            Rank(pp, cp, tp)
            for pp in range(self.pp)
            for cp in range(self.cp)
            for tp in range(self.tp)
        ]

    def owner(self, position: int) -> int:
        """The context-parallel rank whose pages hold the token at ``position``."""
        return position // self.segment % self.cp

    def heads(self, row: LayerRow, tp_rank: int) -> tuple[int, int]:
        """Global kv or state heads ``[a, b)`` that a rank holds; fewer heads than ranks are copied."""
        if row.heads == 1 and row.kind in PAGED:
            return 0, 1
        if self.tp >= row.heads:
            at = tp_rank * row.heads // self.tp
            return at, at + 1
        width = row.heads // self.tp
        return tp_rank * width, (tp_rank + 1) * width

    def check(self, model: Model) -> None:
        """Raises ValueError for heads that do not spread over the ranks."""
        self.stages(model)
        for row in model.rows:
            uneven = row.heads % self.tp and self.tp % row.heads
            few = row.kind not in ("indexer", "mamba2", "kda", "gdn") and row.queries % self.tp
            states = row.kind in ("mamba2", "kda", "gdn") and row.heads % self.tp
            if (uneven and row.heads > 1) or few or states:
                raise ValueError(f"row {row.name!r}: its heads do not spread over tp={self.tp}")
