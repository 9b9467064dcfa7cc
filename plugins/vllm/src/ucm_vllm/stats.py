"""Counters and gauges of both sides, carried and exported by vLLM's own connector metrics.

Each process counts what it does itself; vLLM has us add the workers' counts to the scheduler's and
exports the sum once, from the process that owns its metrics. Of gauges the highest stands. A key is
``name`` or ``name|kind``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ucm_vllm.store_counters import STORE_COUNTERS, STORE_GAUGES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: name -> (help, has a ``kind`` label). Exported as ``ucm:ucm_<name>_total``.
COUNTERS: dict[str, tuple[str, bool]] = {
    "requests": ("Requests that asked the store for a prefix.", False),
    "query_tokens": ("Tokens that the store was asked for: those that vLLM did not have.", False),
    "hit_tokens": ("Tokens that the store supplied and the engine continued from.", False),
    "uncacheable_requests": ("Requests left alone, by reason.", True),
    "lookup_failures": ("Lookups that failed or did not answer in time, by reason.", True),
    "suppressed_blocks": ("Blocks found but not offered: an earlier load of them failed.", False),
    "touched_objects": ("Objects told to be in use, so that collectors keep them.", False),
    "touch_dropped_objects": ("Objects in use that could not be told: too many waited.", False),
    "prefetched_blocks": ("Blocks of waiting requests that a tier was told to fetch.", False),
    "load_blocks": ("Stored blocks loaded into the engine.", False),
    "load_bytes": ("Bytes loaded into the engine.", False),
    "load_failed_blocks": ("Stored blocks that a load did not deliver, by kind.", True),
    "save_blocks": ("Stored blocks that became durable.", False),
    "save_bytes": ("Bytes that became durable.", False),
    "save_failed_blocks": ("Stored blocks that were not saved, by kind.", True),
    "load_seconds": ("Time from submission to result of loads, summed.", False),
    "preempt_wait_seconds": (
        "Time the engine waited for copies out of blocks that it took back (preemption, windows).",
        False,
    ),
    "states_not_kept": ("States that vLLM offered and the retention rule did not keep.", False),
    "checkpoints_evicted": (
        "Stored states given up for better ones (`retention_budget_gb`).",
        False,
    ),
    "checkpoints_missed": ("States that were found, and gone when a load came for them.", False),
    "checkpoint_directory_forgotten": (
        "Entries that the checkpoint directory had no room for; the states are still stored.",
        False,
    ),
    "kv_events_dropped": ("KV events that vLLM did not collect in time.", False),
    "anomalies": ("Events that did not fit a request's state; please report them.", False),
}

#: Gauges of the scheduler: name -> (help, has a ``kind`` label).
SCHEDULER_GAUGES: dict[str, tuple[str, bool]] = {
    "checkpoint_directory_entries": ("States that the scheduler knows to be stored.", False),
}

#: All counters that are exported: what this adapter counts and what the workers' stores do.
EXPORTED: dict[str, tuple[str, bool]] = COUNTERS | {
    name: (text, has_kind) for name, (text, has_kind, _) in STORE_COUNTERS.items()
}
#: All gauges, exported as ``ucm:ucm_<name>``.
GAUGES: dict[str, tuple[str, bool]] = SCHEDULER_GAUGES | {
    name: (text, has_kind) for name, (text, has_kind, _) in STORE_GAUGES.items()
}


def _is_gauge(key: str) -> bool:
    return key.partition("|")[0] in GAUGES


class UcmStats(KVConnectorStats):
    """``data`` maps keys of :data:`EXPORTED` to numbers since the last collection, and keys of
    :data:`GAUGES` to what was seen since."""

    def add(self, name: str, amount: float = 1, kind: str = "") -> None:
        """Count. ``kind`` only for counters that have one."""
        if amount:
            key = f"{name}|{kind}" if kind else name
            self.data[key] = self.data.get(key, 0) + amount

    def level(self, name: str, value: float, kind: str = "") -> None:
        """What a gauge shows now; of several reports before a collection the highest."""
        self._raise_to(f"{name}|{kind}" if kind else name, value)

    def _raise_to(self, key: str, value: float) -> None:
        self.data[key] = max(self.data.get(key, value), value)

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> UcmStats:
        for key, value in other.data.items():
            if _is_gauge(key):
                self._raise_to(key, value)
            else:
                self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {key.replace("|", "."): round(value, 3) for key, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> UcmStats | None:
        """What was counted since the last call, or None."""
        if not self.data:
            return None
        taken = UcmStats(data=self.data)
        self.data = {}
        return taken


class UcmPromMetrics(KVConnectorPromMetrics):
    """Registers every metric once, with vLLM's labels, and takes over what each step reports."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"ucm:ucm_{name}",
                documentation=text,
                labelnames=[*labelnames, "kind"] if has_kind else list(labelnames),
            )
            for name, (text, has_kind) in EXPORTED.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"ucm:ucm_{name}",
                documentation=text,
                multiprocess_mode="mostrecent",
                labelnames=[*labelnames, "kind"] if has_kind else list(labelnames),
            )
            for name, (text, has_kind) in GAUGES.items()
        }
        # A counter without labels of its own shows as 0 from the start: "no failure" is visible.
        for values in per_engine_labelvalues.values():
            for name in SCHEDULER_GAUGES:
                self._gauges[name].labels(*values)
            for name, (_, has_kind) in EXPORTED.items():
                if not has_kind:
                    self._counters[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, kind = key.partition("|")
            if (counter := self._counters.get(name)) is not None:
                counter.labels(*values, *([kind] if EXPORTED[name][1] else [])).inc(amount)
            elif (gauge := self._gauges.get(name)) is not None:
                gauge.labels(*values, *([kind] if GAUGES[name][1] else [])).set(amount)
