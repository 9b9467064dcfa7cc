"""An engine's layer names, resolved per model part, and layers that only show another's data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ucm_core.adapter.unit_map import LayerKey
from ucm_core.errors import ConfigError
from ucm_core.spec import TARGET, Kind, LayerSpec

#: Where a layer's bytes lie: start address and length.
Span = tuple[int, int]


def layer_number(name: str) -> int:
    """The one number in a dotted layer name: ``model.layers.3.self_attn`` -> 3.

    Raises ConfigError where there is none or several: then the adapter must say which it is.
    """
    numbers = [int(word) for word in name.split(".") if word.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(
            f"layer name {name!r} has {len(numbers)} numbers among its dotted words, expected 1; tell "
            "the layer's index explicitly"
        )
    return numbers[0]


def resolve_names(
    names: Mapping[str, Iterable[str]], target_layers: int
) -> dict[str, dict[str, LayerKey]]:
    """Part -> engine name -> layer, from the names that each model part registered.

    A name means something only inside its part: the draft model's ``layers.0`` is not the target's.
    Draft layers that an engine numbers on after the target's (all of them ``>= target_layers``) start
    at 0 in their own part. Raises ConfigError where two names of one kind of data in one part have
    one number, told apart by what follows the number.
    """
    resolved: dict[str, dict[str, LayerKey]] = {}
    for part, listed in names.items():
        numbered = {name: layer_number(name) for name in listed}
        beyond = part != TARGET and all(n >= target_layers for n in numbered.values())
        shift = target_layers if beyond else 0
        keys = {name: LayerKey(part, n - shift) for name, n in numbered.items()}
        _refuse_twins(part, keys)
        resolved[part] = keys
    return resolved


def _refuse_twins(part: str, keys: Mapping[str, LayerKey]) -> None:
    seen: dict[tuple[LayerKey, str], str] = {}
    for name, key in keys.items():
        what = ".".join(name.split(".")[-2:])
        other = seen.setdefault((key, what), name)
        if other != name:
            raise ConfigError(
                f"{other!r} and {name!r} are both layer {key.index} of {part!r}: they belong to "
                "different parts, register each with its own"
            )


def without_ghosts(
    layers: Sequence[LayerSpec], spans: Mapping[str, Span]
) -> tuple[list[LayerSpec], dict[str, str]]:
    """``layers`` without sidecars that only show another layer's bytes, and ghost -> owner by name.

    Engines register a shared indexer with every layer that reads it. ``spans``: where each sidecar's
    bytes lie, by name (several ghosts, one span); sidecars without an entry are taken for real. The
    owner is the first layer, which computes them; a ghost is not declared, so it is stored once and
    loaded before its first holder runs. Partly overlapping spans are refused (ConfigError).
    """
    owners: dict[Span, LayerSpec] = {}
    ghosts: dict[str, str] = {}
    for layer in sorted(layers, key=lambda layer: (layer.part, layer.index)):
        span = spans.get(layer.name) if layer.kind is Kind.SIDECAR else None
        if span is None:
            continue
        owner = owners.setdefault(span, layer)
        if owner is not layer:
            if (owner.entry_bytes, owner.part) != (layer.entry_bytes, layer.part):
                raise ConfigError(
                    f"sidecars {owner.name!r} and {layer.name!r} share their bytes but differ in size "
                    "or model part"
                )
            ghosts[layer.name] = owner.name
    ordered = sorted(owners.items())
    for ((begin, nbytes), a), ((next_begin, _), b) in itertools.pairwise(ordered):
        if begin + nbytes > next_begin:
            raise ConfigError(f"sidecars {a.name!r} and {b.name!r} overlap in part")
    return [layer for layer in layers if layer.name not in ghosts], ghosts
