"""Where a host pool keeps its pages, as SGLang's own zero-copy interface tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core.errors import UnsupportedError

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PageTable:
    """A page consists of parts (K and V; the states of a layer kind), each at a base plus a stride a page.

    ``bases``, ``strides``: ``uint64[P]`` bytes. ``nbytes``: of each part. ``page``: host indices a page
    (tokens; 1 for a state). ``count``: pages in the pool.
    """

    bases: Addresses
    strides: Addresses
    nbytes: tuple[int, ...]
    page: int
    count: int

    @classmethod
    def measure(cls, pool: Any) -> PageTable:
        """Ask ``pool`` for its first, second and last page. Refuses a pool whose pages do not lie one
        after the other, so that later addresses need no Python per page."""
        import torch

        page, count = int(pool.page_size), int(pool.size) // int(pool.page_size)

        def at(number: int) -> tuple[list[int], list[int]]:
            start = number * page
            pointers, sizes = pool.get_page_buffer_meta(torch.arange(start, start + page))
            return list(pointers), list(sizes)

        first, sizes = at(0)
        second, last = at(min(1, count - 1))[0], at(count - 1)[0]
        bases = np.array(first, dtype=np.uint64)
        strides = np.array(second, dtype=np.uint64) - bases
        found = cls(bases, strides, tuple(sizes), page, count)
        if not np.array_equal(found._of(np.array([count - 1])), [last]):
            raise UnsupportedError(
                f"{type(pool).__name__} keeps its pages of layout {pool.layout} in an order that is not "
                "supported; start SGLang with --hicache-mem-layout page_first (or page_first_direct)"
            )
        return found

    @property
    def page_bytes(self) -> int:
        return sum(self.nbytes)

    def addresses(self, host_indices: Any) -> Addresses:
        """``uint64[N, P]`` of the pages that ``host_indices`` (a tensor of N * page integers) name.

        Raises ValueError where they are not whole pages of this pool.
        """
        indices = np.asarray(host_indices.cpu().numpy(), dtype=np.int64)
        if len(indices) % self.page:
            raise ValueError(f"{len(indices)} host indices are no whole pages of {self.page}")
        firsts = indices[:: self.page]
        numbers = firsts // self.page
        if np.any(firsts % self.page) or np.any(numbers < 0) or np.any(numbers >= self.count):
            raise ValueError(
                f"host indices {firsts[:4].tolist()}... do not begin pages of this pool"
            )
        return self._of(numbers)

    def _of(self, numbers: npt.NDArray[np.int64]) -> Addresses:
        table: Addresses = self.bases + numbers[:, None].astype(np.uint64) * self.strides
        return table


def flat_addresses(nbytes: tuple[int, ...], tensors: list[Any]) -> Addresses:
    """``uint64[N, P]`` of whole pages in contiguous tensors of their own (the legacy interface)."""
    starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    offsets = np.concatenate([[0], np.cumsum(nbytes)[:-1]]).astype(np.uint64)
    table: Addresses = starts[:, None] + offsets
    return table
