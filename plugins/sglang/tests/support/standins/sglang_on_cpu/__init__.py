"""SGLang's hierarchical cache on a machine without an accelerator, for tests.

SGLang calls :func:`install` in each of its processes (entry point group ``sglang.srt.plugins``). What
is added is what SGLang binds on accelerators alone: an allocator of host memory, and the copies between
device and host pools. Which pages go where, and when, stays SGLang's own code.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from sglang_on_cpu import copies, models

#: Modules of SGLang that use the copies.
_POOLS = ("mha", "mla", "mamba", "dsa")
#: SGLang keeps this much memory free beside its host pools, 10 GiB by default.
_RESERVE_BYTES = 1 << 28


def install() -> None:
    """Idempotent. Does nothing where SGLang has a device of its own."""
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import base, common

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = _RESERVE_BYTES
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    for name in _POOLS:
        module = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for copy in (
            copies.transfer_kv_direct,
            copies.transfer_kv_per_layer_direct_pf_lf,
            copies.transfer_kv_all_layer_direct_lf_pf,
        ):
            setattr(module, copy.__name__, copy)
        for pool in vars(module).values():
            if isinstance(pool, type) and issubclass(pool, base.HostKVCache):
                _unpinned(pool)
    if os.environ.get("SGLANG_USE_CPU_ENGINE"):
        models.install()


def _allocate(
    dims: Any, dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any, **_: Any
) -> torch.Tensor:
    """Plain memory: there is no driver to pin it for."""
    del pin_memory
    memory: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return memory


def _unpinned(pool: type) -> None:
    """``pin_memory`` is False unless the caller says otherwise."""
    init = pool.__dict__.get("__init__")
    if init is None:
        return
    if (init.__kwdefaults__ or {}).get("pin_memory"):
        init.__kwdefaults__["pin_memory"] = False
    code = init.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = list(init.__defaults__ or ())
    if "pin_memory" in names:
        place = names.index("pin_memory") - len(names)
        if -place <= len(defaults) and defaults[place] is True:
            defaults[place] = False
            init.__defaults__ = tuple(defaults)
