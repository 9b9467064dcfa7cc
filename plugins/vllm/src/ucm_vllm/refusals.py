"""What of a vLLM deployment is not supported, in words for an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm_vllm.devices import SERVED

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_KNOWN_LATER = {
    "SlidingWindowMLASpec": "sliding-window MLA",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "SinkFullAttentionSpec": "attention with sink blocks",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "encoder-only attention",
}
#: Speculative methods without KV layers of their own.
_DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})


def deployment_problems(vllm_config: VllmConfig) -> list[str]:
    """What is wrong whatever the model is."""
    problems = []
    parallel = vllm_config.parallel_config
    device = str(vllm_config.device_config.device_type)
    if device not in SERVED:
        problems.append(
            f"the KV cache is on {device}: no copies between it and the store; served are "
            f"{', '.join(SERVED)}"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            problems.append(f"{name}={size}: context parallelism is not supported yet; set it to 1")
    speculative = vllm_config.speculative_config
    method = getattr(speculative, "method", None)
    if speculative is not None and method not in _DRAFTS_WITHOUT_KV:
        problems.append(
            f"speculative method {method!r} keeps draft layers in the KV cache, which is not "
            f"supported yet; use one of {sorted(_DRAFTS_WITHOUT_KV)} or switch speculation off"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        problems.append(
            "calculate_kv_scales: scales computed on the fly are not part of any identity, so the "
            "KV is not cacheable; use a checkpoint with kv scales"
        )
    return problems


def group_problems(
    kv_cache_config: KVCacheConfig,
    supported: frozenset[str],
    states: frozenset[str] = frozenset(),
) -> list[str]:
    """What is wrong with the model's KV cache groups. ``supported``: exact names of spec classes of KV,
    ``states``: of recurrent states."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return ["the model has no KV cache groups: there is nothing to keep"]
    problems: list[str] = []
    for group in groups:
        specs = layer_specs(group.kv_cache_spec)
        name = type(specs[0]).__name__
        if any(other != specs[0] for other in specs):
            problems.append(
                f"the layers of the KV cache group of {name} differ in shape or dtype, not "
                "supported yet"
            )
        elif name not in supported | states:
            known = _KNOWN_LATER.get(name)
            what = f"{known} (spec {name}) is" if known else f"the unknown KV cache spec {name} is"
            problems.append(f"{what} not supported yet")
        elif not group.enable_kv_transfer or group.host_resident:
            problems.append(
                f"the KV cache group of {name} is kept on the host by another connector"
            )
        elif name not in states:
            problems += _spec_problems(specs[0])
    if not problems and all(
        type(layer_specs(group.kv_cache_spec)[0]).__name__ in states for group in groups
    ):
        problems.append(
            "the model has recurrent states alone, not supported yet: without KV by position nothing "
            "says how far a stored prefix reaches"
        )
    return list(dict.fromkeys(problems))


def layer_specs(spec: Any) -> list[Any]:
    """The specs a KV cache group covers: one per layer inside vLLM's wrapper, else itself."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _spec_problems(spec: Any) -> list[str]:
    problems = []
    if getattr(spec, "attention_chunk_size", None) is not None:
        problems.append(
            f"attention_chunk_size={spec.attention_chunk_size} mixed into full attention: chunked "
            "local attention is not supported yet"
        )
    if getattr(spec, "non_causal", False):
        problems.append("non-causal attention: the KV of a prefix depends on what follows it")
    if spec.tokens_per_state != 1:
        problems.append(
            f"tokens_per_state={spec.tokens_per_state}: compressed KV is not supported yet"
        )
    if spec.kv_quant_mode.name not in ("NONE", "FP8_PER_TENSOR"):
        problems.append(f"KV quantisation {spec.kv_quant_mode.name} is not supported yet")
    version = getattr(spec, "model_version", None)
    if version is not None:
        problems.append(f"the KV format of {version} is not supported yet")
    return problems
