"""Options of the stage `Posix`. Field names are the keys that operators write."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ucm_core.config.options import Options
from ucm_core.config.units import Directories, GibAsBytes, Milliseconds, SecondsAsMs

EngineName = Literal["auto", "psync", "aio", "io_uring"]
LayoutName = Literal["file", "slab"]


class PosixConfig(Options):
    """Files below one or more directories."""

    storage_backends: Directories = Field(
        description="Directories that hold the blocks, separated by ':'. Objects are spread over them "
        "by the identity each carries (.ucm-root), so their order and mount points may change."
    )
    posix_layout: LayoutName = Field(
        "file",
        description="file: one file per block, for any file system and any number of hosts. slab: "
        "fixed slots in preallocated files on the local disks of one node, faster to write and to "
        "give up; needs posix_capacity_gb, and is refused on network file systems, for engines that "
        "span nodes, and for a directory that another host uses.",
    )
    io_direct: bool = Field(
        True,
        description="Bypass the page cache (O_DIRECT). Where a file system refuses it the page cache "
        "is used; `ucm doctor` and the start-up report say which.",
    )
    posix_io_engine: EngineName = Field(
        "auto",
        description="How files are read and written. auto: io_uring where the kernel allows it, else "
        "aio (needs io_direct), else psync (threads).",
    )
    posix_io_threads: int = Field(
        0,
        ge=0,
        le=64,
        description="Reading threads per directory; 0: chosen by engine and CPU count.",
    )
    posix_queue_depth: int = Field(
        0,
        ge=0,
        le=1024,
        description="Files in flight per I/O thread; 0: about 32 MiB worth, between 4 and 64.",
    )
    posix_fsync: bool = Field(
        False,
        description="Flush every file before it becomes visible. Off: after a power loss the last "
        "blocks may be lost; torn ones fail their checksum and are never delivered.",
    )
    posix_verify_checksums: bool = Field(
        True,
        description="Verify every byte that is loaded. Only turn this off to diagnose: a damaged file "
        "then reaches the model.",
    )
    posix_stall_ms: Milliseconds = Field(
        5_000,
        description="An I/O thread that hangs in one system call for longer is replaced, and the file "
        "reported.",
    )
    posix_capacity_gb: GibAsBytes = Field(
        0,
        description="Budget for all directories together; beyond posix_gc_trigger_threshold_ratio of "
        "it the coldest blocks are removed. 0: never remove a block. With posix_layout slab: required, "
        "preallocated for each namespace, and used to the full.",
    )
    posix_gc_trigger_threshold_ratio: float = Field(
        0.7, gt=0, le=1, description="Share of posix_capacity_gb above which blocks are removed."
    )
    posix_gc_recycle_percent: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Share of posix_capacity_gb that a collection frees (a ratio: 0.1 is 10 %).",
    )
    posix_gc_candidate_extra: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of each directory's files considered beyond the recycled one.",
    )
    posix_gc_check_interval_sec: SecondsAsMs = Field(
        30_000, description="Time between looks at the space in use."
    )
    posix_orphan_age_sec: SecondsAsMs = Field(
        600_000,
        description="Temporaries not written to for longer belong to a crashed writer and are removed.",
    )
    posix_touch_interval_sec: SecondsAsMs = Field(
        60_000, description="A block's access time is renewed at most so often."
    )

    @model_validator(mode="after")
    def _consistent(self) -> PosixConfig:
        if self.posix_io_engine == "aio" and not self.io_direct:
            raise ValueError("posix_io_engine 'aio' needs io_direct; use io_uring or psync")
        if self.posix_layout == "slab" and self.posix_capacity_gb == 0:
            raise ValueError(
                "posix_layout 'slab' preallocates its files: set posix_capacity_gb to their size"
            )
        if self.posix_gc_recycle_percent > self.posix_gc_trigger_threshold_ratio:
            raise ValueError(
                "posix_gc_recycle_percent is larger than posix_gc_trigger_threshold_ratio: a "
                "collection would remove everything"
            )
        return self
