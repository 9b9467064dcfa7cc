"""A row of the spec table: a store group."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ucm_core.identity.seed import GroupFacts
from ucm_core.spec.kinds import STORED, Kind, RankRule, Unit, parse
from ucm_core.spec.layer import TARGET


@dataclass(frozen=True, slots=True)
class Retention:
    """Which of the snapshots an engine offers are kept.

    ``interval``: every so many tokens (None: no periodic ones). ``at_end``: at the end of a request
    that computed something new. ``budget_bytes``: ceiling for the group, value = frequency x recency.
    """

    interval: int | None = None
    at_end: bool = True
    budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """All layers of equal kind, window, heads, head size, dtype and compression.

    ``block_tokens``: chain and sidecar: tokens of a stored block; snapshot: the checkpoint grid.
    ``layers``: global layer numbers, ascending, over all stages. ``entry_bytes``, ``compression``,
    ``heads``, ``window``, ``role``, ``part``: see :class:`~ucm_core.spec.layer.LayerSpec`. ``follows``:
    the row a sidecar or follower belongs to. ``store``: which store instance holds it.
    """

    name: str
    kind: Kind
    layers: tuple[int, ...]
    block_tokens: int = 0
    entry_bytes: int = 0
    heads: int = 1
    head_size: int = 1
    dtype: str = ""
    window: int | None = None
    compression: int = 1
    rank_rule: RankRule = RankRule.INTERSECTION
    retention: Retention = Retention()
    follows: str | None = None
    unit: Unit = Unit.LAYER
    store: str = ""
    role: str = ""
    part: str = TARGET

    def __post_init__(self) -> None:
        where = f"row {self.name!r}"
        set_ = object.__setattr__
        set_(self, "kind", parse(Kind, self.kind, where))
        set_(self, "rank_rule", parse(RankRule, self.rank_rule, where))
        set_(self, "unit", parse(Unit, self.unit, where))
        set_(self, "layers", tuple(sorted(self.layers)))
        set_(self, "store", self.store or (self.name if self.kind in STORED else ""))

    @property
    def votes(self) -> bool:
        """Chain groups vote on how far a hit reaches; the others do not."""
        return self.kind is Kind.CHAIN

    @property
    def entries_per_block(self) -> int:
        return 1 if self.kind is Kind.SNAPSHOT else self.block_tokens // self.compression

    @property
    def shard_bytes(self) -> int:
        """Bytes of one layer of one object, all heads."""
        return self.entries_per_block * self.entry_bytes

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes per token and layer; of a snapshot per state."""
        return Fraction(self.entry_bytes, self.compression)

    def needed(self, position: int) -> tuple[int, int]:
        """Blocks ``[first, stop)`` of a chain row (or its sidecar) that hold what an engine reads when it
        continues at ``position``: all before it, or those that a window still reaches."""
        first = 0 if self.window is None else max(position - self.window, 0) // self.block_tokens
        return first, -(-position // self.block_tokens)

    @property
    def facts(self) -> GroupFacts:
        """The canonical name that goes into ids; the row's own name does not."""
        return GroupFacts(
            kind=self.kind.value,
            heads=self.heads,
            head_size=self.head_size,
            dtype=self.dtype,
            block_tokens=None if self.kind is Kind.SNAPSHOT else self.block_tokens,
            window=self.window,
            compression=self.compression,
            role=self.role,
            part=self.part,
        )
