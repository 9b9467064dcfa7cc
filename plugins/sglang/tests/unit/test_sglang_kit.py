"""SGLang's own storage scenarios (its wheel has them, for its ``file`` backend) with our backend instead."""

from __future__ import annotations

import json
import unittest
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from tiny_models import ensure_model

from trees import FULL, SLIDING, STATES, backend_options, model_of_kit


class Kit(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """The kit; wherever it asks for its ``file`` backend it gets ours over the same directory."""

    __test__ = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.cfg = config

    def runTest(self) -> None:
        """unittest wants one."""

    def _init_hicache(
        self,
        cache: Any,
        *,
        write_policy: str = "write_through",
        storage_backend: str | None = None,
        storage_dir: str | None = None,
        prefetch_threshold: int | None = None,
        prefetch_policy: str = "wait_complete",
        host_memory_mode: str = "cache",
        storage_extra: dict[str, Any] | None = None,
        context_length: int | None = None,
    ) -> None:
        assert storage_backend == "file"
        assert storage_dir is not None
        parallel = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        parallel.__enter__()
        self.addCleanup(parallel.__exit__, None, None, None)
        extra = {
            **backend_options(Path(storage_dir)),
            "prefetch_threshold": prefetch_threshold,
            **(storage_extra or {}),
        }
        server = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_write_policy=write_policy,
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            hicache_storage_prefetch_policy=prefetch_policy,
            hicache_host_memory_mode=host_memory_mode,
            context_length=context_length,
        )
        server.model_path = str(ensure_model("llama"))
        server._mamba_cache_chunk_size = max(64, self.cfg.page_size)
        set_global_server_args_for_scheduler(server)
        cache.init_hicache(server, cache.cache_init_params)
        self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        controller = cache.cache_controller
        limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
        controller.prefetch_capacity_limit = limit
        self.addCleanup(controller._stop_storage_threads)


@pytest.fixture
def kit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    config = request.param
    model_of_kit(config, monkeypatch)
    made = Kit(config)
    yield made
    made.doCleanups()


every_kind = pytest.mark.parametrize(
    "kit", [FULL, SLIDING, STATES], ids=["full", "sliding", "states"], indirect=True
)
sliding = pytest.mark.parametrize("kit", [SLIDING], ids=["sliding"], indirect=True)


@every_kind
def test_produce_and_consume(kit: Any, tmp_path: Path) -> None:
    tokens = kit._make_seq(1, 6)
    wanted = kit._l3_produce(str(tmp_path), tokens, marker=7)
    cache, allocator, requests = kit._l3_consumer(str(tmp_path))
    kit._consume_prefetch(cache, tokens, CacheRequestHandle("one", 0))
    kit._load_back_through_admission(cache, requests, tokens)
    kit._finish_pending_loads(cache)
    match = fixtures.match_prefix(cache, tokens)
    assert match.device_prefix_len == len(tokens)
    got = kit._snapshot_full_kv(allocator, cache.path_device_indices(match.last_device_node))
    assert [bool((a == b).all()) for a, b in zip(got, wanted, strict=True)] == [True] * len(wanted)


@sliding
@pytest.mark.parametrize("lost", [False, True], ids=["both ranks", "one rank lost the window"])
def test_ranks_agree_on_the_window(kit: Any, lost: bool) -> None:
    """A window that one rank does not have is not adopted by the other."""
    made = kit._setup_swa_tp_prefetch()
    assert made is not None
    root, tokens = made
    cache, _, _ = kit._l3_consumer(root)
    cache.cache_controller.prefetch_completion_sync_groups = [None]
    kit._patch_tp_prefetch_sync(cache, drop_swa=lost)
    kit._consume_prefetch(cache, tokens, CacheRequestHandle("ranks", 0))
    assert kit._swa_host_on_path(cache, tokens) is not lost
    assert ComponentType.SWA in cache.tree_components


@sliding
@pytest.mark.parametrize("tail", [0, 4])
def test_resident_pages_are_not_fetched_again(kit: Any, tmp_path: Path, tail: int) -> None:
    tokens = kit._buffer_swa_seq()
    kit._produce_buffer_l3(str(tmp_path), tokens, marker=3)
    kit._assert_masked_full_is_reused(str(tmp_path), tokens, tail)


@sliding
def test_a_siblings_head_is_trimmed(kit: Any, tmp_path: Path) -> None:
    kit._assert_sibling_head_is_trimmed(str(tmp_path), kit._buffer_swa_seq(), False)
