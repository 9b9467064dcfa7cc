"""``make bench-sglang``: UCM beside SGLang's own ``file`` backend, through SGLang's own host pool.

Real pages of 1 MiB in a real host pool of layout ``page_first``, moved by the functions that SGLang's
cache controller uses for each backend: zero copy for UCM, a flat copy of each page for ``file``. Both write
to one disk, in turns. *Set* ends when the bytes are on the disk (fsync) for both. *Cold* means dropped from
the page cache. Run with the interpreter of ``make engine-sglang``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.support.limits import Limits
from benchmarks.support.machine import QUIET_LOAD, describe, load_average
from benchmarks.support.meter import Sample, Series, cpu_ratio, interleave, measure, wall_ratio
from benchmarks.support.report import Report, Table, Target
from benchmarks.support.shapes import CacheShape

ROOT = Path(__file__).resolve().parents[1]
PAGE_TOKENS, HEADS, HEAD_SIZE, LAYERS = 64, 8, 128, 4
PAGE_BYTES = 2 * PAGE_TOKENS * HEADS * HEAD_SIZE * LAYERS * 2
#: What SGLang hands to a backend at once.
BATCH = 128
#: UCM with its own host cache above the files, which takes part where pages are warm.
HOST_CACHE = "ucm, host cache"
PACKAGES = ("ucm-core", "sglang", "torch", "numpy")
#: Enough of a checkpoint for SGLang's model configuration; the weights are named, not read.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


class Pages:
    """A host pool with ``count`` random pages, as many empty ones, and their keys."""

    def __init__(self, count: int, scratch: Path) -> None:
        sys.path.insert(0, str(ROOT / "plugins/sglang/tests/support/standins"))
        import torch

        import sglang_on_cpu

        sglang_on_cpu.install()
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        model = scratch / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        server = ServerArgs(model_path=str(model), page_size=PAGE_TOKENS, device="cpu")
        set_global_server_args_for_scheduler(server)
        device = MHATokenToKVPool(
            size=PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=HEAD_SIZE,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.pool = MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            float(2 * count + 2),
            0,
            PAGE_TOKENS,
            "page_first",
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=PAGE_TOKENS,
            start_layer=0,
            end_layer=LAYERS - 1,
        )
        self.pool.kv_buffer.view(torch.int16).random_(0, 2**14)
        self.source = self.pool.alloc(count * PAGE_TOKENS)
        self.target = self.pool.alloc(count * PAGE_TOKENS)
        self.count = count
        self._prompts = 0

    def new_keys(self) -> list[str]:
        """Keys of a prompt that nobody has stored."""
        from sglang.srt.mem_cache.utils import get_hash_str

        self._prompts += 1
        tokens = [self._prompts] * (self.count * PAGE_TOKENS)
        return list(get_hash_str(tokens, None, page_size=PAGE_TOKENS))

    def check(self) -> None:
        """The target holds what the source does."""
        import torch

        for first in (0, self.count // 2, self.count - 1):
            at = first * PAGE_TOKENS
            pages = [self.pool.get_data_page(int(side[at])) for side in (self.source, self.target)]
            if not torch.equal(*(page.view(torch.int16) for page in pages)):
                raise RuntimeError(f"page {first} came back with other bytes")

    def wipe(self) -> None:
        import torch

        for first in self.target[::PAGE_TOKENS].tolist():
            page = self.pool.get_data_page(first)
            self.pool.set_from_flat_data_page(first, torch.zeros_like(page))


class Contestant:
    """A backend behind the controller functions that SGLang would use for it."""

    def __init__(self, name: str, pages: Pages, directory: Path) -> None:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        directory.mkdir()
        self.name, self.pages, self.directory = name, pages, directory
        ours = name != "file"
        extra: dict[str, Any] = {"file_storage_path": str(directory)}
        if ours:
            extra = {
                "backend_name": "ucm",
                "module_path": "ucm_sglang.backend",
                "class_name": "UCMStorage",
                "interface_v1": 1,
                "store_pipeline": "Posix",
                "storage_backends": str(directory),
                "model_id": "bench",
                "posix_fsync": True,
            }
        if name == HOST_CACHE:
            capacity = pages.count * PAGE_BYTES * 5 // 4 >> 20
            extra |= {
                "store_pipeline": "Cache|Posix",
                "cache_buffer_capacity_gb": f"{capacity} MiB",
            }
        config = HiCacheStorageConfig(
            0, 1, 0, 1, 0, 1, False, False, True, "bench", extra_config=extra
        )
        kind = "dynamic" if ours else name
        self.backend = StorageBackendFactory.create_backend(kind, config, pages.pool)
        self.backend.register_mem_pool_host(pages.pool)
        self.backend.on_host_pools_registered()
        controller = object.__new__(HiCacheController)
        controller.storage_backend = self.backend
        controller.storage_host_pool = controller.mem_pool_host = pages.pool
        controller.page_size = PAGE_TOKENS
        self._set = controller._page_set_zero_copy if ours else controller._generic_page_set
        self._get = controller._page_get_zero_copy if ours else controller._generic_page_get
        self.keys: list[str] = []

    def set(self) -> Sample:
        """All pages under new keys, until they are on the disk."""
        self.keys = self.pages.new_keys()
        return measure(self._write, nbytes=self.pages.count * PAGE_BYTES, operations=len(self.keys))

    def _write(self) -> None:
        for keys, where in self._batches(self.pages.source):
            if not self._set(keys, where, None):
                raise RuntimeError(f"{self.name} did not store a batch")
        if self.name == "file":  # UCM's stage has synchronised each file
            for path in self._new_files():
                _with_descriptor(path, os.fsync)

    def get(self, *, cold: bool) -> Sample:
        self.pages.wipe()
        if cold:
            for path in self._files():
                _with_descriptor(path, os.fsync)
                _with_descriptor(
                    path, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                )
        else:
            self._read()
        sample = measure(
            self._read, nbytes=self.pages.count * PAGE_BYTES, operations=len(self.keys)
        )
        self.pages.check()
        return sample

    def _read(self) -> None:
        operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
        for keys, where in self._batches(self.pages.target):
            if self._get(operation, keys, where, None) != len(keys):
                raise RuntimeError(f"{self.name} did not deliver a batch")

    def exists(self) -> Sample:
        found: list[int] = []
        sample = measure(
            lambda: found.append(self.backend.batch_exists(self.keys)), operations=len(self.keys)
        )
        if found != [len(self.keys)]:
            raise RuntimeError(f"{self.name} found {found} of {len(self.keys)}")
        return sample

    def _batches(self, indices: Any) -> list[tuple[list[str], Any]]:
        return [
            (self.keys[i : i + BATCH], indices[i * PAGE_TOKENS : (i + BATCH) * PAGE_TOKENS])
            for i in range(0, len(self.keys), BATCH)
        ]

    def _files(self) -> list[Path]:
        return [p for p in self.directory.rglob("*") if p.is_file()]

    def _new_files(self) -> list[Path]:
        names = set(self.keys)
        return [p for p in self._files() if p.name.split("_")[0] in names]


def _with_descriptor(path: Path, action: Callable[[int], object]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        action(descriptor)
    finally:
        os.close(descriptor)


def run(report: Report, limits: Limits, scratch: Path, pages: int, rounds: int) -> None:
    """``pages`` of 1 MiB a repetition, each kind of call in turns."""
    held = Pages(pages, scratch)
    ucm, file = (Contestant(name, held, scratch / name) for name in ("ucm", "file"))
    cached = Contestant(HOST_CACHE, held, scratch / "cached")
    cached.set()
    rows: list[list[str]] = []
    calls: tuple[tuple[str, Callable[[Contestant], Sample], float | None], ...] = (
        ("set, on disk", Contestant.set, 1.5),
        ("get, cold", partial(Contestant.get, cold=True), 1.5),
        ("get, warm", partial(Contestant.get, cold=False), None),
    )
    for what, call, goal in calls:
        taking_part = (ucm, file, cached) if what == "get, warm" else (ucm, file)
        series = interleave({c.name: partial(call, c) for c in taking_part}, rounds=rounds)
        rows += _rows(what, series)
        if goal is not None:
            ratio = 1 / wall_ratio(series["ucm"], series["file"])
            report.target(Target(f"{what}: UCM / file, GB/s", "at least", goal, ratio))
        cpu = cpu_ratio(series["ucm"], series["file"])
        report.target(Target(f"{what}: CPU seconds per GB, UCM / file", "at most", 1.0, cpu))
        if what == "get, warm":
            copy = _copy(limits, scratch, pages, rounds)
            share = series[HOST_CACHE].gb_per_s / copy.gb_per_s
            report.target(
                Target(f"get, warm, {HOST_CACHE}: share of the copy limit", "at least", 0.8, share)
            )
            rows.append(["copy limit", "one thread", f"{copy.gb_per_s:.2f}", "", ""])
    exists = interleave({c.name: c.exists for c in (ucm, file)}, rounds=rounds)
    for name, one in exists.items():
        rows.append(["exists", name, "", "", f"{1e6 / one.operations_per_s:.2f}"])
    note = (
        f"{pages} pages of {PAGE_BYTES >> 20} MiB a repetition, {rounds} in turns, batches of {BATCH}; "
        "SGLang's host pool of layout page_first and its controller's own page functions."
    )
    columns = ("call", "backend", "GB/s", "CPU s/GB", "us a key")
    report.table(Table("SGLang: pages to and from storage", columns, rows, note))
    for contestant in (ucm, cached):
        contestant.backend.close()


def _rows(what: str, series: dict[str, Series]) -> list[list[str]]:
    return [
        [what, name, f"{one.gb_per_s:.2f}", f"{one.cpu_s_per_gb:.3f}", ""]
        for name, one in series.items()
    ]


def _copy(limits: Limits, scratch: Path, pages: int, rounds: int) -> Series:
    """The copy kernel on as many halves of pages."""
    halves = CacheShape("sglang", "halves of pages", 1, PAGE_BYTES // 2, 2, pages)
    arguments = halves.limit_arguments(scratch)

    def once() -> Sample:
        return limits.run("copy", direction="out", kernel="ucm", threads=1, **arguments)

    return interleave({"copy": once}, rounds=rounds)["copy"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang", description=__doc__)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--force", action="store_true", help="write figures of a busy machine")
    parser.add_argument("--limits", type=Path, default=ROOT / "build/dev/native/ucm_limits")
    parser.add_argument("--directory", type=Path, default=ROOT / "build/bench-data")
    parser.add_argument("--out", type=Path, help="write the page there")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    load = load_average()
    machine = describe(options.directory, PACKAGES)
    report = Report()
    scratch = Path(tempfile.mkdtemp(prefix="sglang-", dir=options.directory))
    try:
        with Limits(options.limits) as limits:
            run(report, limits, scratch, options.pages, options.rounds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(report.targets_table().text())
    if options.out is not None and (load <= QUIET_LOAD or options.force):
        options.out.write_text(report.markdown(machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
