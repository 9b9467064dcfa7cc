"""The seed of a group's object ids: everything but the prefix that changes the stored bytes.

``seed = SHA-256("ucm/1/" || encode(fields))`` with the encoding of ``identity/encoding.py``. What does
not change the meaning is not in it: engine, engine block size, memory layout, TP and PP rank or
size, served name, path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ucm_core.identity.encoding import Encodable, encode, floats

_TAG = b"ucm/1/"


def runs(layers: Iterable[int]) -> list[list[int]]:
    """Layer numbers as maximal half-open ranges: ``(0, 1, 2, 5)`` -> ``[[0, 3], [5, 6]]``."""
    out: list[list[int]] = []
    for layer in sorted(set(layers)):
        if out and out[-1][1] == layer:
            out[-1][1] = layer + 1
        else:
            out.append([layer, layer + 1])
    return out


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The canonical name of a group: what its layers have in common, never an engine's number.

    ``kind``: ``"chain"``, ``"snapshot"`` or ``"sidecar"``. ``window``: tokens, None for the whole prefix.
    ``heads``: kv heads (or state heads) of a whole layer, over all ranks. ``head_size``: elements.
    ``compression``: tokens per stored entry. ``role``: tells apart groups whose other facts are equal
    but whose bytes mean different things (``"indexer"``, ``"scales"``; ``""`` for plain KV or state).
    ``part``: the model part the layer numbers belong to (``"target"``, ``"draft"``). ``block_tokens``:
    tokens one object covers, None for a snapshot: a block of 128 and one of 64 can end at one link.
    """

    kind: str
    heads: int
    head_size: int
    dtype: str
    block_tokens: int | None
    window: int | None = None
    compression: int = 1
    role: str = ""
    part: str = "target"

    def encodable(self) -> dict[str, Encodable]:
        return {
            "kind": self.kind,
            "heads": self.heads,
            "head_size": self.head_size,
            "dtype": self.dtype,
            "block_tokens": self.block_tokens,
            "window": self.window,
            "compression": self.compression,
            "role": self.role,
            "part": self.part,
        }


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What all groups of one running model share.

    ``weights``: :class:`~ucm_core.identity.weights.WeightsIdentity` ``.value`` (or an explicit
    ``model_id``). ``kv_dtype``: canonical name of the cache's element type (``"bf16"``, ``"fp8_e4m3"``).
    ``quantization``: how the weights or the cache are quantised at run time, None if they are not.
    ``rope``: rope parameters as the model declares them; ints count as floats.
    ``extra``: whatever else changes bytes (attention chunk, softcap, fixed adapters, codec).
    """

    weights: str
    kv_dtype: str
    quantization: str | None = None
    rope: Mapping[str, Encodable] | None = None
    extra: Mapping[str, Encodable] = field(default_factory=dict)

    def group(
        self,
        facts: GroupFacts,
        layers: Iterable[int],
        head_range: tuple[int, int],
    ) -> GroupIdentity:
        """Identity of the objects of one group at one coordinate."""
        return GroupIdentity(self, facts, tuple(sorted(set(layers))), head_range)

    def with_extra(self, **facts: Encodable) -> ModelIdentity:
        """A copy with more byte-changing facts; a fact already there must be equal."""
        for name, value in facts.items():
            if name in self.extra and encode(self.extra[name]) != encode(value):
                raise ValueError(f"extra {name!r} is {self.extra[name]!r} already, not {value!r}")
        return replace(self, extra={**self.extra, **facts})


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """A group's objects at one coordinate: global layers and a global kv-head range.

    ``layers``: the group's global layer numbers inside the object, ascending. ``head_range``:
    ``(first, last + 1)`` of the group's kv heads over all ranks.
    """

    model: ModelIdentity
    facts: GroupFacts
    layers: tuple[int, ...]
    head_range: tuple[int, int]

    def __post_init__(self) -> None:
        lo, hi = self.head_range
        if not self.layers or min(self.layers) < 0:
            raise ValueError(f"layers must be non-empty and not negative, got {self.layers}")
        if not 0 <= lo < hi <= self.facts.heads:
            raise ValueError(
                f"head range [{lo}, {hi}) does not lie within the {self.facts.heads} kv heads"
            )

    def encodable(self) -> dict[str, Encodable]:
        """The value that is encoded; the test vectors and ``ucm spec`` show it."""
        layers: list[Encodable] = [list(run) for run in runs(self.layers)]
        return {
            "weights": self.model.weights,
            "kv_dtype": self.model.kv_dtype,
            "quantization": self.model.quantization,
            "rope": floats(self.model.rope),
            "extra": self.model.extra,
            "group": self.facts.encodable(),
            "layers": layers,
            "head_range": list(self.head_range),
        }

    def seed(self) -> bytes:
        """32 bytes. Computed once per group and coordinate at start; keep it."""
        return hashlib.sha256(_TAG + encode(self.encodable(), "identity")).digest()
