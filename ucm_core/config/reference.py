"""Names that operators of the reference system know, and what this release does with each.

Nothing is ignored silently: a name is either an option of ours (then it is not in this file),
accepted with a warning because leaving it out changes no result and loses no protection, or refused
with what to do.
"""

from __future__ import annotations

from typing import Any

#: ``ucm_connector_name`` -> the pipeline it fixes (None: ``store_pipeline`` says).
CONNECTORS: dict[str, str | None] = {"UcmPipelineStore": None, "UcmNfsStore": "Posix"}

#: Connector names that are recognised and refused, with the answer.
REFUSED_CONNECTORS = {
    "UcmDramStore": "use UcmPipelineStore with store_pipeline 'DramPool' and ucm-backend-dram",
    "UcmMooncakeStore": "use UcmPipelineStore with store_pipeline 'Mooncake' and "
    "ucm-backend-mooncake",
}

#: Keys of ``UcmNfsStore`` that mean one of ours.
NFS_ALIASES = {"use_direct": "io_direct", "transferIoDirect": "io_direct"}

_MOONCAKE = "needs the plugin ucm-backend-mooncake"
_DRAM = "needs the plugin ucm-backend-dram"
_VENDOR = "is a vendor's: it needs that vendor's plugin for UCM"

#: Pipelines of other packages -> what provides them.
PIPELINE_HINTS = {
    "Mooncake": _MOONCAKE,
    "Mooncake|Posix": _MOONCAKE,
    "Cache|Mooncake": _MOONCAKE,
    "DramPool": _DRAM,
    "Dram": _DRAM,
    "Cache|DramPool": _DRAM,
    "Cache|DramPool|Posix": _DRAM,
    "Cache|Ds3fs": f"{_VENDOR}; 3FS also works as a mounted directory in storage_backends",
    "ASU": _VENDOR,
    "Delegator": _VENDOR,
    "YuanRong": _VENDOR,
    "YuanRong|Posix": _VENDOR,
}

_TUNING = "tunes the reference system's own threads or devices; there is nothing like it here"
_NO_CACHE = "belongs to the host cache (stage Cache), which this pipeline does not have"

#: Keys of ``ucm_connector_config`` without meaning here, accepted with a warning.
HARMLESS_STORE_KEYS = {
    "posix_data_trans_concurrency": _TUNING,
    "posix_open_concurrency": _TUNING,
    "posix_commit_concurrency": _TUNING,
    "posix_lookup_concurrency": _TUNING,
    "posix_gc_concurrency": _TUNING,
    "cache_io_aggregation": _TUNING,
    "cache_sdma_direct": _TUNING,
    "cache_buffer_capacity_gb": _NO_CACHE,
    "cache_load_exclusive_buffer_number": _NO_CACHE,
    "share_buffer_enable": _NO_CACHE,
    "local_rank_size": _NO_CACHE,
    "posix_gc_max_recycle_count_per_shard": _TUNING,
    "posix_gc_shard_sample_ratio": _TUNING,
    "posix_gc_task_timeout_ms": _TUNING,
    "posix_gc_precise_mode": _TUNING,
    "kv_block_size": "sizes come from the engine",
}

#: Keys at the top level without meaning here, accepted with a warning.
HARMLESS_TOP_KEYS = {
    "enable_metrics": "metrics are always on; the engine exposes them",
    "metrics_config_path": "metrics are always on; the engine exposes them",
    "load_only_first_rank": "who loads follows from what the ranks share",
    "wa_dump_block_wise": "window blocks are chosen by what a window can still reach",
    "load_tokens_threshold": "small hits are loaded too",
}

#: Keys at the top level that are refused.
REFUSED_TOP_KEYS = {
    "ucm_sparse_config": "sparse attention is no part of UCM's cache; remove it",
}

#: Option -> (values that mean "off", why nothing else is accepted). Rows go when a feature is built;
#: a row is used only while no loaded stage and no option model has the key, or for ``CoreOptions``.
NOT_BUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_gdr": (
        (False,),
        "direct transfers between storage and device are not built yet: bytes go through pinned host "
        "buffers, where their checksums are verified",
    ),
    "enable_record_traces": ((False,), "recording of request traces is not built yet"),
    "cache_load_backend_only": ((False,), "needs a pipeline with the stage Cache"),
}
