"""How loads and saves meet compute, from ``use_layerwise``; what cannot be is refused at start.

| ``use_layerwise`` | loads | saves |
|---|---|---|
| ``auto``, ``false`` | before the request runs | in bulk, after the step |
| ``save`` | before the request runs | layer by layer, recurrent states after the step |
| ``true`` | layer by layer, in the request's first step | layer by layer, published a step later |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ucm_core.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ucm_vllm.facts import Facts

#: Values of the option.
Choice = bool | Literal["auto", "save"]


@dataclass(frozen=True, slots=True)
class Modes:
    """``look_ahead``: layers loaded ahead of the computing one, None: measured. ``tail_tokens``: what is
    left to compute of a prompt that is stored whole."""

    layered_loads: bool = False
    layered_saves: bool = False
    look_ahead: int | None = None
    tail_tokens: int = 1

    @property
    def held_back(self) -> bool:
        """What a step computed is published only when every rank's loads of that step were good: a
        request computes on its loads in the very step that brings them."""
        return self.layered_loads

    def summary(self) -> str:
        """For the report at start."""
        loads = (
            "layer by layer, overlapped with compute"
            if self.layered_loads
            else "before the request runs (async direct)"
        )
        saves = (
            "layer by layer" if self.layered_saves else "in bulk in the step that completes a block"
        )
        held = ", published when the step's loads were good on all ranks" if self.held_back else ""
        return f"loads {loads}; saves {saves}{held}"


def choose_modes(
    choice: Choice, look_ahead: int | None = None, *, tail: int | None = None, drafts: int = 0
) -> Modes:
    """What the options mean. ``tail``: the operator's number of tokens to compute, None: 1, or with
    ``drafts`` and loads in the very step that verifies drafts, ``drafts + 2``: that step schedules the
    drafts behind a token of its own."""
    layered_loads = choice is True
    if tail is None:
        tail = drafts + 2 if layered_loads and drafts else 1
    return Modes(
        layered_loads=layered_loads,
        layered_saves=choice is True or choice == "save",
        look_ahead=look_ahead,
        tail_tokens=tail,
    )


def drafts_of(vllm_config: VllmConfig) -> int:
    """Draft tokens that speculation adds to a step, 0 without."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def check_modes(modes: Modes, facts: Facts, vllm_config: VllmConfig) -> None:
    """Raise :class:`UnsupportedError` with every reason why the chosen modes cannot be."""
    problems = []
    if modes.layered_loads and not facts.continues_anywhere:
        what = (
            f"{len(facts.tables)} KV cache groups"
            if len(facts.tables) > 1
            else "a sliding window everywhere"
        )
        problems.append(
            f"the model has {what}: loads layer by layer are synchronous, and vLLM has no way to hear of "
            "a failed synchronous load of such a model; saves alone can be layer by layer: "
            'use_layerwise: "save"'
        )
    parallel = vllm_config.parallel_config
    in_flight = [
        name
        for name, on in (
            ("asynchronous scheduling", vllm_config.scheduler_config.async_scheduling),
            (
                f"pipeline_parallel_size={parallel.pipeline_parallel_size}",
                parallel.pipeline_parallel_size > 1,
            ),
        )
        if on
    ]
    if modes.layered_loads and in_flight:
        problems.append(
            f"{' and '.join(in_flight)}: when a load turns out bad, vLLM has the request's next step in "
            "flight already and takes its tokens; start vLLM with --no-async-scheduling and without "
            "pipeline stages"
        )
    if modes.layered_saves and getattr(parallel, "use_ubatching", False):
        problems.append(
            "vLLM runs each layer once per micro-batch (enable_dbo or ubatch_size): a layer's call does "
            "not mean that the layer is complete"
        )
    if problems:
        raise UnsupportedError(
            "use_layerwise is not possible here:\n" + "\n".join(f"  - {p}" for p in problems)
        )
