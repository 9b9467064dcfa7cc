"""From validated options to the native stage."""

from __future__ import annotations

import logging
from typing import Any

from ucm_backend_posix.config import PosixConfig
from ucm_core import _native
from ucm_core.errors import ConfigError
from ucm_core.registry import StageContext
from ucm_core.store.native_store import native_geometry

logger = logging.getLogger("ucm.posix")


def build_posix(context: StageContext, config: PosixConfig, below: Any) -> _native.PosixStage:
    """Set up the stage; creates missing directories and writes a test file into each.

    Raises ``ConfigError`` that names the directory, the errno and what to do. Tools take no part in
    collection, whatever the options say.
    """
    if below is not None:
        raise ConfigError("stage Posix is the last of a pipeline; nothing can stand below it")
    if config.posix_layout == "slab" and context.nodes > 1:
        raise ConfigError(
            f"posix_layout 'slab' is for the local disks of one node, but this engine spans "
            f"{context.nodes} nodes; use posix_layout 'file' on a shared directory"
        )
    try:
        stage = _native.PosixStage(
            native_geometry(context.geometry),
            roots=[str(root) for root in config.storage_backends],
            namespace_dir=context.namespace_dir_name,
            namespace_digest=context.namespace_digest,
            direct=config.io_direct,
            engine=config.posix_io_engine,
            layout=config.posix_layout,
            read_threads=config.posix_io_threads,
            depth=config.posix_queue_depth,
            fsync=config.posix_fsync,
            verify_checksums=config.posix_verify_checksums,
            stall_ms=config.posix_stall_ms,
            # A lookup that takes as long as a whole task may take is no use to a scheduler.
            lookup_timeout_ms=min(5_000, context.timeout_ms),
            touch_interval_ms=config.posix_touch_interval_sec,
            gc_enabled=context.role != "tool",
            capacity_bytes=config.posix_capacity_gb,
            gc_trigger=config.posix_gc_trigger_threshold_ratio,
            gc_recycle=config.posix_gc_recycle_percent,
            gc_candidate_extra=config.posix_gc_candidate_extra,
            gc_interval_ms=config.posix_gc_check_interval_sec,
            orphan_age_ms=config.posix_orphan_age_sec,
        )
    except _native.PosixSetupError as error:
        raise ConfigError(str(error)) from error
    _report(context, stage.describe())
    return stage


def _report(context: StageContext, facts: dict[str, str]) -> None:
    """One line per directory: where blocks go and how. Decisions and fallbacks are never silent."""
    count = sum(1 for name in facts if name.startswith("root."))
    for i in range(count):
        logger.info(
            "%s: blocks of %s bytes in %s, engine %s",
            context.owner or "Posix",
            facts["file_bytes"],
            facts[f"root.{i}"],
            facts[f"engine.{i}"],
        )
    if facts["layout"] == "slab":
        logger.info(
            "%s: %s slab files of %s bytes, index of %s bytes %s",
            context.owner or "Posix",
            facts["slabs"],
            facts["slab_bytes"],
            facts["index_bytes"],
            facts["index"],
        )
    if facts["checksums"] != "on":
        logger.warning("posix_verify_checksums is off: damaged files will reach the model")
