"""The copies between device and host pools of ``hicache_io_backend=direct``, with torch's indexing.

``lf`` is a device pool: a list of layers, ``[tokens, ...]`` each. ``pf`` is a host pool of the layout
``page_first_direct``: ``[pages, layers, tokens of a page, ...]``. Indices name tokens; pages are whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def transfer_kv_direct(
    src_layers: Tensors,
    dst_layers: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Rows of each layer to rows of its partner."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer, host to device."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers, device to host. ``src_ptrs``: the layers of the first target, then of the second."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        rows = source[src_indices]
        target[pages, number % layers] = rows.reshape(len(pages), *target.shape[2:])
