"""In place of SGLang's kernel package, which has no CPU build on the registry.

Names can be imported and fail when they are called, so nothing here can quietly compute something else.
No operator of the real package is defined either: SGLang then takes its plain torch code.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "0+standin"

#: Looked up, not called, while SGLang's CPU modules are imported.
_LOOKED_UP = (
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in _LOOKED_UP:
    _library.define(f"{_name}() -> ()")


def copy_all_layer_kv_cache_cpu(
    k_cache: list[torch.Tensor],
    v_cache: list[torch.Tensor],
    target: torch.Tensor,
    source: torch.Tensor,
    *_: Any,
) -> None:
    """Rows ``source`` of every layer to rows ``target``; the two may overlap."""
    for cache in (*k_cache, *v_cache):
        cache[target] = cache[source].clone()


def absent(where: str) -> Any:
    """A module-level ``__getattr__`` for ``where``: every name exists and refuses to be called."""

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{where}.{name}: no such kernel on a CPU")

        return call

    return lookup


__getattr__ = absent("sgl_kernel")
