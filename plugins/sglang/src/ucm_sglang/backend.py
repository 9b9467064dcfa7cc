"""The class that SGLang loads: its storage interface, call by call.

``--hicache-storage-backend dynamic`` with ``"module_path":"ucm_sglang.backend","class_name":"UCMStorage"``.
Registration may raise, which stops the server with the reason. Later calls never do: whatever goes wrong
is a miss or a page that was not saved, counted and logged, and costs a recompute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)

from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.store.contract import Addresses, Status
from ucm_sglang.bounded import BoundedCalls
from ucm_sglang.deployment import Deployment, read_options
from ucm_sglang.hits import PoolVote, legal_lengths
from ucm_sglang.keys import Links, links_of
from ucm_sglang.lane import PoolLane
from ucm_sglang.pages import flat_addresses
from ucm_sglang.rotation import rotation
from ucm_sglang.rows import ANCHOR
from ucm_sglang.server import weights_version
from ucm_sglang.stats import UcmCounters

T = TypeVar("T")

_log = logging.getLogger("ucm.sglang")
_limited = RateLimitedLogger(_log)

#: A lookup that takes longer is a miss: recomputing is better than a prefetch thread that hangs.
LOOKUP_TIMEOUT_S = 2.0


class UCMStorage(HiCacheStorage):
    """One rank's storage. SGLang calls from one thread each for lookups, loads and saves; any are fine."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        del kwargs
        self._told = storage_config
        self._config, self._host = read_options(storage_config.extra_config)
        self._pools: dict[str, Any] = {}
        self._deployment: Deployment | None = None
        self._opening = threading.Lock()
        self._lookups: BoundedCalls[Any] = BoundedCalls(LOOKUP_TIMEOUT_S, "ucm-lookup")
        self._counters = UcmCounters(
            exported=bool(storage_config.enable_storage_metrics),
            labels={"tp_rank": str(storage_config.tp_rank), "pp_rank": str(storage_config.pp_rank)},
        )
        self._weights: tuple[str, str] | None = None
        self._cleared = 0
        self._closed = False

    # -- registration: may refuse -------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the prefix's KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools.setdefault(ANCHOR, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Every pool, also the first; one that comes after the start is left alone."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if self._deployment is None:
            self._pools[name] = host_pool
        elif name not in self._deployment.lanes:
            _log.warning("host pool %r was added after the start: its pages are not stored", name)

    def on_host_pools_registered(self) -> None:
        """All pools are known: open the stores. Raises UnsupportedError or ConfigError with reasons."""
        self._open()

    def _open(self) -> Deployment:
        with self._opening:
            if self._deployment is None:
                deployment = Deployment(self._config, self._host, self._told, self._pools)
                text = deployment.report(lambda warning: _log.warning("%s", warning))
                if self._told.tp_rank == 0:
                    _log.info("%s", text)
                self._weights = weights_version()
                self._deployment = deployment
            return self._deployment

    def _lane(self, name: Any) -> PoolLane | None:
        """None: a pool that is not stored, or nothing is any more."""
        if self._closed:
            return None
        deployment = self._deployment or self._open()
        if weights_version() != self._weights:
            _limited.warning(
                "weights",
                "the weights were replaced while the server runs: nothing is loaded or saved "
                "until it is started again",
            )
            return None
        return deployment.lanes.get(str(name))

    # -- is it there --------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Pages at the beginning of ``keys`` that are stored."""
        del extra_info
        return self._guarded("batch_exists", 0, lambda: self._leading(keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The greatest length at which every pool can continue, each pool's own, and all legal lengths."""
        del extra_info
        return self._guarded(
            "batch_exists_v2",
            PoolTransferResult(0, {}, []),
            lambda: self._restorable(keys, pool_transfers or ()),
        )

    def _leading(self, keys: Sequence[str]) -> int:
        lane = self._lane(ANCHOR)
        if lane is None or not keys:
            return 0
        links = links_of(keys)
        found = int(self._look(lambda: lane.leading(links)))
        self._count_query(len(keys), found)
        return found

    def _restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> PoolTransferResult:
        kv_pages = self._leading(keys)
        links = links_of(keys[:kv_pages])
        votes: list[PoolVote] = []
        for transfer in transfers:
            lane = self._lane(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or str(transfer.name) == ANCHOR:
                continue
            there = np.zeros(kv_pages, dtype=bool)
            if lane is not None and kv_pages:
                there = self._look(partial(lane.present, links))
            trailing = None
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing = max(1, len(transfer.keys or ()))
            votes.append(PoolVote(str(transfer.name), there, trailing))
        legal, greatest = legal_lengths(kv_pages, votes)
        if kv_pages:
            greatest[ANCHOR] = kv_pages
        return PoolTransferResult(legal[-1] if legal else 0, greatest, legal)

    def _look(self, question: Callable[[], Any]) -> Any:
        try:
            return self._lookups(question)
        except Exception as error:
            self._counters.add("lookup_failures", kind=type(error).__name__)
            raise

    def _count_query(self, asked: int, found: int) -> None:
        self._counters.add("query_pages", asked)
        self._counters.add("hit_pages", found)

    # -- pages of the registered pools, in place ----------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into the anchor pool; True where a page is in place, verified."""
        del extra_info
        return self._move("batch_get_v1", ANCHOR, keys, host_indices, load=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Save pages of the anchor pool; True where a page is durable."""
        del extra_info
        return self._move("batch_set_v1", ANCHOR, keys, host_indices, load=False)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        del extra_info
        return self._move_pools("batch_get_v2", transfers, load=True)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        del extra_info
        return self._move_pools("batch_set_v2", transfers, load=False)

    def _move_pools(self, call: str, transfers: Sequence[Any], load: bool) -> dict[str, list[bool]]:
        return {
            t.name: self._move(call, t.name, t.keys or [], t.host_indices, load=load)
            for t in transfers
        }

    def _move(
        self, call: str, pool: Any, keys: Sequence[str], host_indices: Any, *, load: bool
    ) -> list[bool]:
        nothing = [False] * len(keys)
        if not keys or host_indices is None:
            return nothing

        def move() -> list[bool]:
            lane = self._lane(pool)
            if lane is None:
                return nothing
            parts = lane.pool.shape.pages.addresses(host_indices)
            return self._run(lane, links_of(keys), parts, load=load)

        return self._guarded(call, nothing, move)

    def _run(self, lane: PoolLane, links: Links, parts: Addresses, *, load: bool) -> list[bool]:
        if len(parts) != len(links):
            raise ValueError(f"{len(links)} keys for {len(parts)} pages")
        start = time.monotonic()
        results = (lane.load if load else lane.save)(links, parts)
        seconds = time.monotonic() - start
        self._counters.moved("load" if load else "save", results, lane.page_bytes, seconds)
        good = results == Status.OK
        bad = int((~good).sum())
        if bad:
            worst = Status(int(results.max())).name.lower()
            what = "were not delivered" if load else "were not saved"
            _limited.warning("pages", "%d of %d pages %s (%s)", bad, len(good), what, worst)
        return [bool(ok) for ok in good]

    # -- pages in tensors of their own (interface_v1 off) -------------------------------------------

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Fill the flat page tensors ``target_locations``; None where a page is not there."""
        del target_sizes
        nothing: list[Any] = [None] * len(keys)
        if not keys or target_locations is None:
            return nothing

        def get() -> list[Any]:
            lane = self._lane(ANCHOR)
            if lane is None:
                return nothing
            parts = self._flat(lane, target_locations)
            good = self._run(lane, links_of(keys), parts, load=True)
            return [t if ok else None for t, ok in zip(target_locations, good, strict=True)]

        return self._guarded("batch_get", nothing, get)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Save flat page tensors; True when all are durable."""
        del target_locations, target_sizes
        if not keys or values is None:
            return False

        def save() -> bool:
            lane = self._lane(ANCHOR)
            if lane is None:
                return False
            flat = [value.contiguous() for value in values]  # kept alive until the save is done
            return all(self._run(lane, links_of(keys), self._flat(lane, flat), load=False))

        return self._guarded("batch_set", False, save)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        del target_sizes
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        del target_location, target_sizes
        return value is not None and self.batch_set([key], [value])

    @staticmethod
    def _flat(lane: PoolLane, tensors: Sequence[Any]) -> Addresses:
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes != lane.page_bytes or not tensor.is_contiguous():
                raise ValueError(
                    f"a page has {lane.page_bytes} contiguous bytes, got a tensor of {nbytes}"
                )
        return flat_addresses(lane.pool.shape.pages.nbytes, list(tensors))

    # -- the rest -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Nothing stored so far is found any more by this server; the collector removes it in time."""

        def forget() -> None:
            self._cleared += 1
            fresh = rotation(self._cleared)
            for lane in (self._deployment or self._open()).lanes.values():
                lane.rotate(fresh)

        self._guarded("clear", None, forget)

    def get_stats(self) -> Any:
        """SGLang's storage metrics since the last call."""
        return self._guarded("get_stats", None, self._counters.take)

    def counters(self) -> dict[str, float]:
        """Everything counted so far, by name or ``name|kind``."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Finish what runs, release memory and threads. Later calls are misses. Idempotent."""
        self._closed = True
        self._lookups.close()
        if self._deployment is not None:
            self._guarded("close", None, self._deployment.close)

    def _guarded(self, call: str, otherwise: T, run: Callable[[], T]) -> T:
        try:
            return run()
        except Exception as error:  # SGLang's threads must go on whatever happens here
            self._counters.add("call_failures", kind=call)
            _limited.warning(call, "%s: %s", call, error)
            return otherwise


__all__ = ["UCMStorage"]
