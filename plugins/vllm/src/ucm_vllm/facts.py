"""What a vLLM deployment is, as far as a cache cares; and what is refused at start, with the reason.

``read_facts`` looks at vLLM's configuration only, which is the same in the scheduler and in every
worker, so that all of them derive the same coordinates. Nothing here opens a store or a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm_core.errors import UnsupportedError
from ucm_core.identity.model_config import KV_DTYPES
from ucm_vllm.packing import PageOrder, find_order, kernel_writer
from ucm_vllm.refusals import deployment_problems, group_problems, layer_specs
from ucm_vllm.stages import KindOf, kinds_of_layers
from ucm_vllm.states import STATE_SPECS, StateKind, state_kind, state_problems

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

#: What vLLM's spec classes mean here, by exact name: a subclass may keep other bytes under the same
#: page, so it is refused until somebody has looked at it.
KINDS = {"FullAttentionSpec": "full", "MLAAttentionSpec": "mla", "SlidingWindowSpec": "window"}


@dataclass(frozen=True, slots=True)
class PageKind:
    """Layers whose pages look alike and are reused alike.

    ``kind``: ``"full"``, ``"mla"`` or ``"window"`` (then ``window`` is its length in tokens).
    ``engine_block``: tokens of a page. ``heads`` are kv heads in a page of one rank, ``total_heads``
    those of the model (1 for MLA); ``cell_bytes`` is what one token and head occupy in one layer (K
    and V together). ``replicas``: consecutive tensor-parallel ranks that hold the same bytes (all of
    them for MLA). ``packing`` names how a kernel packs the tokens of a page ("" for plain rows), and
    ``page_order`` is that order where it is known.
    """

    kind: str
    engine_block: int
    heads: int
    total_heads: int
    head_size: int
    head_size_v: int
    cell_bytes: int
    dtype: str
    packing: str = ""
    page_order: PageOrder | None = None
    replicas: int = 1
    window: int | None = None

    @property
    def packed(self) -> bool:
        """Pages are packed across their tokens by the kernel: no plain cut between tokens."""
        return bool(self.packing)

    @property
    def opaque(self) -> bool:
        """Pages are packed in an order that nobody has described: they fit the same pages only."""
        return self.packed and self.page_order is None


@dataclass(frozen=True, slots=True)
class Facts:
    """The layers of a model and where this deployment cuts them.

    ``kind_of``: per layer of the whole model its index in ``kinds``, None for a layer without KV of
    its own. ``tables``: per KV cache group of vLLM, each with a block table, the kind of its layers,
    None for a group of states. ``table_of``: layer -> group, as far as this process knows (of its own
    pipeline stage, at least). ``states``, ``state_kind_of``, ``state_tables``, ``state_table_of``: the
    same of recurrent states, which a layer may have beside KV. ``stages`` holds the layer range
    ``[first, last)`` of every pipeline stage.
    """

    kinds: tuple[PageKind, ...]
    kind_of: tuple[int | None, ...]
    tables: tuple[int | None, ...]
    table_of: Mapping[int, int]
    kv_cache_dtype: str
    physical_order: str
    stages: tuple[tuple[int, int], ...]
    tp: int
    states: tuple[StateKind, ...] = ()
    state_kind_of: tuple[int | None, ...] = ()
    state_tables: tuple[int | None, ...] = ()
    state_table_of: Mapping[int, int] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Element type of the cache, the same in all layers."""
        return self.kinds[0].dtype

    @property
    def alignment(self) -> int:
        """vLLM continues only from multiples of this many tokens."""
        pages = (kind.engine_block for kind in self.kinds)
        return math.lcm(*pages, *(kind.engine_block for kind in self.states))

    @property
    def shards(self) -> int:
        """Distinct shards over the tensor-parallel ranks, of the kind that is split most."""
        split = [self.tp // kind.replicas for kind in self.kinds]
        return max(*split, *(kind.ranks for kind in self.states), 1)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same bytes of at least one kind."""
        return max(kind.replicas for kind in self.kinds)

    @property
    def continues_anywhere(self) -> bool:
        """True when a request can go on after any of its valid blocks: nothing is windowed, no state is
        needed, and a block id says which tokens it holds. Else a failed load is a failed request's load."""
        return len(self.tables) == 1 and all(kind.window is None for kind in self.kinds)


def read_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Facts:
    """The facts, or :class:`UnsupportedError` naming every reason why this cannot be cached."""
    problems = deployment_problems(vllm_config)
    problems += group_problems(kv_cache_config, frozenset(KINDS), STATE_SPECS)
    for spec in _state_specs(kv_cache_config):
        problems += state_problems(spec)
    if problems:
        raise UnsupportedError(
            "UCMConnector cannot serve this deployment:\n"
            + "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
        )
    return _facts(vllm_config, kv_cache_config)


def _facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Facts:
    from vllm.distributed.utils import get_pp_indices

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    layers = model.get_total_num_hidden_layers()
    groups = kv_cache_config.kv_cache_groups
    declared = [_declared(vllm_config, layer_specs(g.kv_cache_spec)[0]) for g in groups]
    kinds = tuple(dict.fromkeys(kind for kind in declared if isinstance(kind, PageKind)))
    states = tuple(dict.fromkeys(kind for kind in declared if isinstance(kind, StateKind)))
    tables = tuple(kinds.index(k) if isinstance(k, PageKind) else None for k in declared)
    state_tables = tuple(states.index(k) if isinstance(k, StateKind) else None for k in declared)
    table_of = _tables(kv_cache_config, layers, [i for i, t in enumerate(tables) if t is not None])
    with_states = [i for i, t in enumerate(state_tables) if t is not None]
    state_table_of = _tables(kv_cache_config, layers, with_states, state=True)
    named = {layer: of for layer, table in table_of.items() if (of := tables[table]) is not None}
    named_states = {
        layer: of
        for layer, table in state_table_of.items()
        if (of := state_tables[table]) is not None
    }
    if len(groups) == 1:  # the names are those of one pipeline stage only, but all layers are alike
        kind_of: KindOf = (0,) * layers
        state_kind_of: KindOf = (None,) * layers
    else:
        kind_of, state_kind_of = kinds_of_layers(
            model, kinds, states, named, named_states, layers, stages=pp
        )
    _check_replicas(kinds, kv_cache_config, tp)
    dtypes = sorted({kind.dtype for kind in kinds})
    if len(dtypes) > 1:
        raise UnsupportedError(
            f"the KV cache has layers of several precisions ({', '.join(dtypes)}), not supported yet"
        )
    return Facts(
        kinds=kinds,
        kind_of=kind_of,
        tables=tables,
        table_of=table_of,
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        physical_order=str(kv_cache_config.kv_cache_layout or ""),
        stages=tuple(get_pp_indices(layers, rank, pp) for rank in range(pp)),
        tp=tp,
        states=states,
        state_kind_of=state_kind_of,
        state_tables=state_tables,
        state_table_of=state_table_of,
    )


def _state_specs(kv_cache_config: KVCacheConfig) -> list[Any]:
    specs = [layer_specs(group.kv_cache_spec)[0] for group in kv_cache_config.kv_cache_groups]
    return [spec for spec in specs if type(spec).__name__ in STATE_SPECS]


def _declared(vllm_config: VllmConfig, spec: Any) -> PageKind | StateKind:
    """What a group of vLLM keeps."""
    if type(spec).__name__ in STATE_SPECS:
        device = str(vllm_config.device_config.device_type)
        return state_kind(spec, device, vllm_config.parallel_config.tensor_parallel_size)
    return _page_kind(vllm_config, spec)


def layer_number(name: str, layers: int, *, state: bool) -> int:
    """The layer that a cache of vLLM belongs to, in a model of ``layers`` layers.

    vLLM tells caches by number, so a layer that has a state beside KV gives the state a second one: its
    own plus ``layers``.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    number = int(extract_layer_index(name))
    return number - layers if state and number >= layers else number


def _tables(
    kv_cache_config: KVCacheConfig, layers: int, tables: Sequence[int], *, state: bool = False
) -> dict[int, int]:
    """Layer -> group, of the layers that vLLM names to this process; of some of the groups."""
    found: dict[int, int] = {}
    names: dict[int, str] = {}
    for table in tables:
        for name in kv_cache_config.kv_cache_groups[table].layer_names:
            index = layer_number(name, layers, state=state)
            if index >= layers or index in names:
                other = f" as {names[index]} has" if index in names else ""
                raise UnsupportedError(
                    f"KV cache {name} has layer number {index}{other}, in a model of {layers} layers: "
                    "several caches of one layer are not supported yet"
                )
            names[index] = name
            found[index] = table
    return found


def _page_kind(vllm_config: VllmConfig, spec: AttentionSpec) -> PageKind:
    kind = KINDS[type(spec).__name__]
    tp = vllm_config.parallel_config.tensor_parallel_size
    total, replicas = 1, tp
    if kind != "mla":
        total = spec.num_heads if tp == 1 else vllm_config.model_config.get_total_num_kv_heads()
        replicas = max(1, tp * spec.num_heads // total)
        if tp % replicas or spec.num_heads * (tp // replicas) != total:
            raise UnsupportedError(
                f"tensor parallelism over {tp} ranks: the model has {total} kv heads, but a rank's page "
                f"of {type(spec).__name__} holds {spec.num_heads}; use tensor_parallel_size=1"
            )
    packing, page_order = _packing(vllm_config, spec, kind)
    return PageKind(
        kind=kind,
        engine_block=spec.block_size,
        heads=spec.num_heads,
        total_heads=total,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        cell_bytes=spec.state_content_size_bytes,
        dtype=str(spec.dtype).removeprefix("torch."),
        packing=packing,
        page_order=page_order,
        replicas=replicas,
        window=getattr(spec, "sliding_window", None) if kind == "window" else None,
    )


def _check_replicas(kinds: tuple[PageKind, ...], kv_cache_config: KVCacheConfig, tp: int) -> None:
    """vLLM counts replicas itself, where it knows them; it must agree with us."""
    ours = math.gcd(*(kind.replicas for kind in kinds))
    theirs = getattr(kv_cache_config, "kv_tp_replicas", ours)
    if theirs not in (1, ours):
        raise UnsupportedError(
            f"tensor parallelism over {tp} ranks: the kv heads mean {ours} ranks with the same KV, but "
            f"vLLM says {theirs}"
        )


def _packing(vllm_config: VllmConfig, spec: Any, kind: str) -> tuple[str, PageOrder | None]:
    """Name of the kernel's private packing of a page ("" when a page is plain rows), and its order.

    The CPU kernels pack K and V in tiles that depend on the instruction set, so two machines may
    hold different bytes under the same shape. MLA keeps plain rows everywhere.
    """
    if kind == "mla":
        return "", None
    device = str(vllm_config.device_config.device_type)
    if device != "cpu":
        # What the kernels of a GPU keep inside a page is theirs to know: shared among equal deployments.
        return f"{device}_attn", None
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    # The generic kernel is compiled once per instruction set, so its tiles may differ as well.
    name = f"cpu_attn-{isa}-{torch.backends.cpu.get_cpu_capability().lower()}"
    short = KV_DTYPES.get(str(spec.dtype).removeprefix("torch."))
    if short is None or spec.head_size_v != spec.head_size or spec.kv_quant_mode.name != "NONE":
        return name, None  # quantised while it is written: not a matter of order alone
    write = kernel_writer(spec.dtype, spec.block_size, spec.head_size, isa)
    try:
        return name, find_order(short, spec.block_size, spec.head_size, write)
    except RuntimeError:  # no kernel writes such pages: the engine will say so itself
        return name, None
