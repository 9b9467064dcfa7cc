"""What the stores of a worker count, as vLLM's connector metrics; and their health in the log.

Counters are what a process did itself, so that sums over ranks count nothing twice. Gauges are never
added up: of several stores or ranks the highest figure stands, which for what ranks share (the host
cache of a node) is the figure. Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from ucm_core.store.contract import BlockStore

_log = logging.getLogger("ucm.vllm")

#: Reading the counters walks the host cache's slots once: not in every step.
INTERVAL_S = 10.0

#: name -> (help, has a ``kind`` label, {counter of the store: kind}). ``*`` stands for any stage's name,
#: which then becomes the kind, before the kind given.
STORE_COUNTERS: dict[str, tuple[str, bool, dict[str, str]]] = {
    "cache_backend_dump_wait_errors": (
        "Objects that the stage below did not store, after all retries.",
        False,
        {"store.backend_dump_errors_total": ""},
    ),
    "backend_dump_retries": (
        "Tries to store an object after the first.",
        False,
        {"store.backend_dump_retries_total": ""},
    ),
    "device_copy_errors": (
        "Shards whose copy from or to the device failed.",
        False,
        {"store.copy_errors_total": ""},
    ),
    "store_copied_bytes": (
        "Bytes copied between engine memory and host buffers.",
        True,
        {"store.load_copied_bytes_total": "load", "store.dump_copied_bytes_total": "dump"},
    ),
    "store_copy_seconds": (
        "Time spent in those copies, summed over threads.",
        True,
        {"store.load_copy_ns_total": "load", "store.dump_copy_ns_total": "dump"},
    ),
    "stage_bytes": (
        "Bytes moved between a storage stage and its medium.",
        True,
        {
            "*.read_bytes_total": "read",
            "*.write_bytes_total": "write",
            "*.written_bytes_total": "write",
        },
    ),
    "stage_seconds": (
        "Time of those operations from start to end, summed.",
        True,
        {"*.read_us_total": "read", "*.write_us_total": "write"},
    ),
    "stage_outages": (
        "Times the health wrapper took a storage stage out of service.",
        True,
        {"*.health_opened_total": ""},
    ),
    "stage_recoveries": (
        "Times it put one back; fewer than outages: a stage is out of service now.",
        True,
        {"*.health_closed_total": ""},
    ),
    "stage_refused_objects": (
        "Objects that were misses or refused because their stage was out of service.",
        True,
        {"*.health_refused_reads_total": "load", "*.health_refused_writes_total": "dump"},
    ),
    "cache_evictions": (
        "Objects that gave way in the host cache.",
        False,
        {"cache.evictions_total": ""},
    ),
    "cache_shards": (
        "Shards of loads by what the host cache did with them.",
        True,
        {
            "cache.shards_hit_total": "hit",
            "cache.shards_owned_total": "fetched",
            "cache.shards_waited_total": "waited",
        },
    ),
    "hung_io": (
        "I/O threads that were replaced because they hung, and operations given up at shutdown.",
        True,
        {"*.threads_replaced_total": "replaced", "store.abandoned_io_total": "abandoned"},
    ),
    "compressed_bytes": (
        "Bytes handed to the Compress stage, what became of them, and bytes it gave back.",
        True,
        {
            "*.compress_in_bytes_total": "in",
            "*.compress_out_bytes_total": "out",
            "*.decompress_bytes_total": "back",
        },
    ),
    "compress_seconds": (
        "Time its threads spent, summed.",
        True,
        {"*.compress_us_total": "compress", "*.decompress_us_total": "decompress"},
    ),
    "gc_removed_objects": (
        "Stored objects removed by a collector of this process.",
        True,
        {"*.gc_removed_total": ""},
    ),
}

_SLOT_STATES = ("free", "ready", "partial", "dumping", "pinned", "quarantined")

#: The same of what is the case now: the highest figure of any store of any worker.
STORE_GAUGES: dict[str, tuple[str, bool, dict[str, str]]] = {
    "cache_slots": (
        "Slots of the node's host cache by state; one may be pinned beside its state.",
        True,
        {f"cache.slots_{state}": state for state in _SLOT_STATES},
    ),
    "cache_capacity_bytes": (
        "Size that the node's host cache may grow to.",
        False,
        {"cache.capacity_bytes": ""},
    ),
    "store_waiting_tasks": (
        "Loads and dumps that wait for a buffer or a free place.",
        True,
        {"store.loads_waiting": "load", "store.dumps_waiting": "dump"},
    ),
    "stage_queue": (
        "Operations that wait for an I/O thread of a storage stage.",
        True,
        {"*.read_queue": "read", "*.write_queue": "write"},
    ),
    "stage_out_of_service": (
        "1: the health wrapper has taken the stage out of service.",
        True,
        {"*.health_open": ""},
    ),
    "stage_stuck_threads": (
        "I/O threads that hang in a call of the medium.",
        True,
        {"*.stuck_threads": ""},
    ),
    "gc_used_bytes": (
        "Bytes of stored objects as the collector last counted them.",
        True,
        {"*.gc_used_bytes": ""},
    ),
}

#: Native counters in other units than the metric's -> factor.
_FACTORS = {"_ns_total": 1e-9, "_us_total": 1e-6}


class Counts(Protocol):
    """Where news goes."""

    def add(self, name: str, amount: float = 1, kind: str = "") -> None:
        """Count on."""

    def level(self, name: str, value: float, kind: str = "") -> None:
        """What a gauge shows now."""


def counter_of(key: str) -> tuple[str, str] | None:
    """``Posix.read_bytes_total`` -> ``("stage_bytes", "Posix read")``; None: not exported."""
    return _metric_of(key, STORE_COUNTERS)


def gauge_of(key: str) -> tuple[str, str] | None:
    """``Posix.read_queue`` -> ``("stage_queue", "Posix read")``; None: not exported."""
    return _metric_of(key, STORE_GAUGES)


def _metric_of(
    key: str, metrics: Mapping[str, tuple[str, bool, dict[str, str]]]
) -> tuple[str, str] | None:
    stage, _, _ = key.partition(".")
    for name, (_, _, keys) in metrics.items():
        if key in keys:
            return name, keys[key]
        pattern = f"*{key[len(stage) :]}"
        if pattern in keys and stage not in ("store", "cache", "staging"):
            return name, f"{stage} {keys[pattern]}".strip()
    return None


class StoreWatch:
    """Turns the figures of a worker's stores into news, and says when a stage fails or is back."""

    def __init__(self, stores: Iterable[BlockStore], interval_s: float = INTERVAL_S) -> None:
        self._stores = list(stores)
        self._interval_s = interval_s
        self._due = time.monotonic() + interval_s
        self._seen: list[dict[str, int]] = [{} for _ in self._stores]
        self._sick: list[dict[str, str]] = [{} for _ in self._stores]

    def look(self, counts: Counts) -> None:
        """Report what was counted since the last look, at most once per interval."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._interval_s
            self.look_now(counts)

    def look_now(self, counts: Counts) -> None:
        """As :meth:`look`, whatever the time."""
        for at, store in enumerate(self._stores):
            figures = store.stats()
            self._report(at, figures, counts)
            self._log_health(at, store.health())

    def _report(self, at: int, figures: Mapping[str, int], counts: Counts) -> None:
        before = self._seen[at]
        for key, figure in figures.items():
            if (gauge := gauge_of(key)) is not None:
                counts.level(gauge[0], figure, gauge[1])
            amount = figure - before.get(key, 0)
            counter = counter_of(key) if amount > 0 else None
            if counter is None:
                continue
            factor = next((f for end, f in _FACTORS.items() if key.endswith(end)), 1)
            counts.add(counter[0], amount * factor, counter[1])
        self._seen[at] = dict(figures)

    def _log_health(self, at: int, health: Mapping[str, str]) -> None:
        """State changes only: figures inside a message may go on changing."""
        sick = {stage: text for stage, text in health.items() if text}
        for stage, text in sick.items():
            if stage not in self._sick[at]:
                _log.warning("%s: %s", stage, text)
        for stage in self._sick[at]:
            if stage not in sick:
                _log.info("%s is healthy again", stage)
        self._sick[at] = sick
