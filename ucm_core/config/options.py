"""Option models: what may be set, with type, default and one line of help each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ucm_core.config.machine import Machine
from ucm_core.config.units import GIB, GibAsBytes, Milliseconds


class Chosen(NamedTuple):
    """A value chosen from the machine and the reason, in words for the operator."""

    value: Any
    reason: str


class Options(BaseModel):
    """Base of every option model, also of the ``config_model`` of a plugin's stage.

    A field's name is the operator's key and its ``description`` the help text (a test demands one).
    Defaults are in the unit the model holds (bytes, milliseconds), not in the operator's; they are
    not validated again. Unknown keys never reach a model: the loader reports them with the nearest
    known name.
    """

    # Validating defaults would take milliseconds for seconds: 30_000 would become 30_000_000.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)

    @classmethod
    def choose(cls, given: Mapping[str, Any], machine: Machine) -> Mapping[str, Chosen]:
        """Values for options that the operator left out and that depend on the machine.

        ``given`` holds what was set, not yet validated. The answer is shown by ``ucm config`` with
        its reason. Called once per load, in every process: it must not allocate or write anything.
        """
        return {}


class CoreOptions(Options):
    """Options at the top level of the configuration, beside ``ucm_connectors``."""

    block_tokens: int | None = Field(
        None,
        gt=0,
        le=1 << 20,
        description="Tokens of one stored block, a constant of the namespace; equal in every engine "
        "that shares it. Default: the namespace's own, 64 in a new one where the engine's blocks "
        "allow it.",
    )
    head_slices: int | None = Field(
        None,
        gt=0,
        le=1 << 16,
        description="KV-head slices of a stored block, a constant of the namespace. Default: the "
        "namespace's own, the tensor-parallel size of the first writer in a new one.",
    )
    namespace: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Namespace below the storage directories; another name shares nothing. Default: "
        "`default`, with a suffix where block_tokens or head_slices differ from its own.",
    )
    model_id: str | None = Field(
        None,
        min_length=1,
        description="Overrides the identity computed from the weights. Two checkpoints with one "
        "model_id share KV: only set it when you know that they are the same.",
    )
    persist_token_threshold: int = Field(
        0, ge=0, description="Requests with fewer prompt tokens are left alone."
    )
    use_layerwise: bool | Literal["auto", "save"] = Field(
        "auto",
        description="true: load layer by layer, overlapped with compute (one-group models), instead of "
        "before the request runs, and save each layer as it finishes. save: only save so. auto, false: "
        "neither.",
    )
    layerwise_look_ahead: int | None = Field(
        None,
        gt=0,
        le=1024,
        description="Layers loaded ahead of the computing one. Default: from measured load and compute "
        "times.",
    )
    recompute_tail_tokens: int | None = Field(
        None,
        gt=0,
        le=65536,
        description="Tokens at the end of a prompt that are computed even when they are stored. Default: 1, "
        "and with loads layer by layer and speculation as many as drafts, plus 2. Works in vLLM.",
    )
    retention_rule: str = Field(
        "default",
        min_length=1,
        description="Which of the recurrent states that an engine offers are kept: the name of a "
        "registered rule. default: at the end of a prompt, where prompts are seen to share a prefix, "
        "and at retention_interval. The three retention options work in vLLM; in other engines all that "
        "the engine hands over is stored.",
    )
    retention_interval: int | None = Field(
        None,
        gt=0,
        le=1 << 30,
        description="Tokens between the states kept along a prompt; best a multiple of the engine's own "
        "interval. Default: the engine's, so all that it offers.",
    )
    retention_budget_gb: GibAsBytes | None = Field(
        None,
        description="Ceiling for the states of one group that this scheduler had stored; past it the state "
        "with the least uses for its age is removed, in every group. Default: none, the storage's own "
        "limits decide.",
    )
    promise_buffer_gb: GibAsBytes = Field(
        2 * GIB,
        gt=0,
        description="Host memory per node for blocks that are verified before an engine is promised them, "
        "where the engine cannot hear of a failed load (TensorRT-LLM).",
    )
    promise_wait_ms: Milliseconds = Field(
        50,
        description="Longest such an engine's question for a hit waits for blocks to arrive and be "
        "verified; what has not by then is a miss.",
    )
    promise_loads: Literal["auto", "sync", "async"] = Field(
        "auto",
        description="How such an engine loads: sync, in the step that computes the request; async, while "
        "others compute; auto: small ones sync, others async.",
    )
    enable_event_sync: bool = Field(
        True,
        description="Order dumps after compute by device events; false synchronises the whole device "
        "before dumps.",
    )
    enable_record_traces: bool = Field(
        False, description="Record one line per request for later replay."
    )
    use_lite: bool = Field(
        False, description="Look up and trace only: report what would hit, store and load nothing."
    )
