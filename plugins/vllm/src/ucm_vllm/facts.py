"""What a vLLM deployment is, as far as a cache cares; and what is refused at start, with the reason.

``read_facts`` looks at vLLM's configuration only, which is the same in the scheduler and in every
worker, so that all of them derive the same coordinates. Nothing here opens a store or a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucm_core.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

#: Spec classes of one group whose every block is addressed by its prefix, by exact name: a subclass
#: may keep other bytes under the same page, so it is refused until somebody has looked at it.
CHAIN_SPECS = {"FullAttentionSpec": "full", "MLAAttentionSpec": "mla"}
_KNOWN_LATER = {
    "SlidingWindowSpec": "sliding windows",
    "SlidingWindowMLASpec": "sliding-window MLA",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "SinkFullAttentionSpec": "attention with sink blocks",
    "MambaSpec": "recurrent states",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "encoder-only attention",
}
#: Speculative methods without KV layers of their own.
_DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})


@dataclass(frozen=True, slots=True)
class Facts:
    """One KV cache group and where this deployment cuts it.

    ``heads`` are kv heads in a page of one rank, ``total_heads`` those of the model (1 for MLA);
    ``cell_bytes`` is what one token and head occupy in one layer (K and V together).
    ``stages`` holds the layer range ``[first, last)`` of every pipeline stage. ``shards`` is the number
    of distinct head shards over the tensor-parallel ranks and ``replicas`` how many consecutive
    ranks hold the same one (all of them for MLA).
    """

    kind: str
    engine_block: int
    heads: int
    total_heads: int
    head_size: int
    head_size_v: int
    cell_bytes: int
    dtype: str
    kv_cache_dtype: str
    physical_order: str
    packing: str
    stages: tuple[tuple[int, int], ...]
    tp: int
    replicas: int

    @property
    def shards(self) -> int:
        return self.tp // self.replicas

    @property
    def opaque(self) -> bool:
        """Pages are packed across their tokens by the kernel: they cannot be cut between tokens."""
        return bool(self.packing)


def read_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Facts:
    """The facts, or :class:`UnsupportedError` naming every reason why this cannot be cached."""
    problems = _deployment_problems(vllm_config)
    group_problems, spec = _group_spec(kv_cache_config)
    problems += group_problems
    if spec is not None:
        problems += _spec_problems(spec)
    if problems or spec is None:
        raise UnsupportedError(
            "UCMConnector cannot serve this deployment:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    return _facts(vllm_config, kv_cache_config, spec)


def _deployment_problems(vllm_config: VllmConfig) -> list[str]:
    problems = []
    parallel = vllm_config.parallel_config
    device = str(vllm_config.device_config.device_type)
    if device != "cpu":
        problems.append(
            f"the KV cache is on {device}: copies between device memory and the store are not built "
            "yet; only the CPU platform is served"
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


def _group_spec(kv_cache_config: KVCacheConfig) -> tuple[list[str], AttentionSpec | None]:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(_unwrapped(g.kv_cache_spec)).__name__ for g in groups) or "none"
        return [
            f"the model has {len(groups)} KV cache groups ({kinds}): only one is supported yet"
        ], None
    spec = groups[0].kv_cache_spec
    inner = list(getattr(spec, "kv_cache_specs", {}).values())
    if inner and any(other != inner[0] for other in inner):
        return [
            "the layers of the KV cache group differ in shape or dtype, not supported yet"
        ], None
    unwrapped = _unwrapped(spec)
    name = type(unwrapped).__name__
    if name not in CHAIN_SPECS:
        known = _KNOWN_LATER.get(name)
        what = f"{known} (spec {name}) is" if known else f"the unknown KV cache spec {name} is"
        return [f"{what} not supported yet"], None
    if not groups[0].enable_kv_transfer or groups[0].host_resident:
        return [f"the KV cache group of {name} is kept on the host by another connector"], None
    return [], unwrapped


def _unwrapped(spec: Any) -> Any:
    inner = getattr(spec, "kv_cache_specs", None)
    return next(iter(inner.values())) if inner else spec


def _spec_problems(spec: AttentionSpec) -> list[str]:
    problems = []
    for field in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, field, None) is not None:
            problems.append(
                f"{field}={getattr(spec, field)} mixed into full attention: several kinds of layers "
                "in one group are not supported yet"
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


def _facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: AttentionSpec) -> Facts:
    from vllm.distributed.utils import get_pp_indices

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kind = CHAIN_SPECS[type(spec).__name__]
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    layers = model.get_total_num_hidden_layers()
    return Facts(
        kind=kind,
        engine_block=spec.block_size,
        heads=spec.num_heads,
        total_heads=1 if kind == "mla" else model.get_total_num_kv_heads(),
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        cell_bytes=spec.state_content_size_bytes,
        dtype=str(spec.dtype).removeprefix("torch."),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        physical_order=str(kv_cache_config.kv_cache_layout or ""),
        packing=_packing(vllm_config, spec, kind),
        stages=tuple(get_pp_indices(layers, rank, pp) for rank in range(pp)),
        tp=tp,
        replicas=_replicas(kv_cache_config, kind, tp, spec, model.get_total_num_kv_heads()),
    )


def _replicas(
    kv_cache_config: KVCacheConfig, kind: str, tp: int, spec: AttentionSpec, total_heads: int
) -> int:
    """Consecutive tensor-parallel ranks that hold identical KV."""
    if kind == "mla":
        return tp
    ours: int = max(1, tp * spec.num_heads // total_heads)
    theirs = getattr(kv_cache_config, "kv_tp_replicas", ours)
    if theirs not in (1, ours) or tp % ours:
        raise UnsupportedError(
            f"tensor parallelism over {tp} ranks: {spec.num_heads} of {total_heads} kv heads on each "
            f"means {ours} replicas, but vLLM says {theirs}"
        )
    return ours


def _packing(vllm_config: VllmConfig, spec: AttentionSpec, kind: str) -> str:
    """Name of the kernel's private packing of a page, "" when a page is plain rows.

    The CPU kernels pack K and V in tiles that depend on the instruction set, so two machines may
    hold different bytes under the same shape. MLA keeps plain rows everywhere.
    """
    if kind == "mla":
        return ""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    # The generic kernel is compiled once per instruction set, so its tiles may differ as well.
    return f"cpu_attn-{isa}-{torch.backends.cpu.get_cpu_capability().lower()}"
