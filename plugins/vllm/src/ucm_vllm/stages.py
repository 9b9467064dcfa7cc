"""What each layer of the whole model keeps, also where this process knows those of one stage only.

With pipeline stages vLLM names to each process the layers of one of them, another set in each. Then the
model's configuration must say what every layer is, and agree with what vLLM made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ucm_core.errors import UnsupportedError

if TYPE_CHECKING:
    from ucm_vllm.facts import PageKind
    from ucm_vllm.states import StateKind

#: Per layer an index of kinds, None for a layer without.
KindOf = tuple[int | None, ...]

#: Words of ``layer_types`` or ``layers_block_type`` -> what such a layer keeps: KV of the whole prefix
#: ("full") or of a window ("window"), or none (""); and whether it keeps a state.
_MEANINGS = {
    "attention": ("full", False),
    "full_attention": ("full", False),
    "sliding_attention": ("window", False),
    "mamba": ("", True),
    "linear_attention": ("", True),
    "hybrid": ("full", True),
    "mlp": ("", False),
    "moe": ("", False),
}


def kinds_of_layers(
    model: Any,
    kinds: Sequence[PageKind],
    states: Sequence[StateKind],
    named: Mapping[int, int],
    named_states: Mapping[int, int],
    layers: int,
    *,
    stages: int,
) -> tuple[KindOf, KindOf]:
    """Per layer its index in ``kinds`` and in ``states``. ``named``, ``named_states``: of the layers that
    vLLM names to this process. Raises UnsupportedError where the other stages' cannot be told."""
    if stages == 1:
        every = range(layers)
        return tuple(map(named.get, every)), tuple(map(named_states.get, every))
    config = model.hf_text_config
    types = list(
        getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    )
    meant = {word: _meant(*of, kinds, states) for word, of in _MEANINGS.items()}
    unclear = sorted({t for t in types if meant.get(t) is None})
    if len(types) != layers or unclear:
        raise UnsupportedError(
            f"{stages} pipeline stages and several KV cache groups: vLLM's scheduler knows the layers of "
            f"one stage only, and layer_types of the model's configuration ({len(types)} of {layers} "
            f"layers{f', unclear: {unclear}' if unclear else ''}) does not tell the others; use tensor "
            "parallelism"
        )
    found = [of for t in types if (of := meant[t]) is not None]
    kind_of, state_of = (tuple(of[at] for of in found) for at in (0, 1))
    for meaning, told, all_kinds in ((kind_of, named, kinds), (state_of, named_states, states)):
        wrong = sorted(layer for layer, kind in told.items() if meaning[layer] != kind)
        if wrong:
            raise UnsupportedError(
                f"layers {wrong[:8]} are not what layer_types of the model's configuration says: vLLM "
                f"gives them {all_kinds[told[wrong[0]]]}"
            )
    return kind_of, state_of


def _meant(
    kv: str, state: bool, kinds: Sequence[PageKind], states: Sequence[StateKind]
) -> tuple[int | None, int | None] | None:
    """The one kind of each sort that the model has; None: there is none, or several."""
    fitting: list[int | None] = [
        i for i, kind in enumerate(kinds) if (kind.window is None) == (kv == "full")
    ]
    fitting = fitting if kv else [None]
    of_state: list[int | None] = [*range(len(states))] if state else [None]
    if len(fitting) != 1 or len(of_state) != 1:
        return None
    return fitting[0], of_state[0]
