"""Counters: through SGLang's own storage metrics where it has a place, the rest beside them.

SGLang asks a backend for :func:`UcmCounters.take` in each of its steps and exports pages and bandwidth as
``sglang:*``. The counters of this module are exported as ``ucm:ucm_<name>_total`` by the same endpoint
(SGLang collects its processes' registries). Imports nothing of SGLang before it is asked.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ucm_core.store.contract import Status

#: name -> (help, has a ``kind`` label). Exported as ``ucm:ucm_<name>_total``.
COUNTERS: dict[str, tuple[str, bool]] = {
    "query_pages": ("Pages that SGLang asked for.", False),
    "hit_pages": ("Of these, pages at the beginning that are stored.", False),
    "lookup_failures": ("Lookups that failed or did not answer in time, by reason.", True),
    "load_pages": ("Pages loaded into a host pool.", False),
    "load_bytes": ("Bytes loaded into host pools.", False),
    "load_failed_pages": ("Pages that a load did not deliver, by kind.", True),
    "load_seconds": ("Time of loads from submission to result, summed.", False),
    "save_pages": ("Pages that became durable.", False),
    "save_bytes": ("Bytes that became durable.", False),
    "save_failed_pages": ("Pages that were not saved, by kind.", True),
    "save_seconds": ("Time of saves from submission until durable, summed.", False),
    "call_failures": (
        "Calls of SGLang answered as a miss because something raised, by call.",
        True,
    ),
}
#: SGLang's lists of pages and bandwidths between two collections are bounded.
_HISTORY = 1024


class UcmCounters:
    """Thread-safe. ``exported``: also as Prometheus counters of this process."""

    def __init__(self, *, exported: bool, labels: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = defaultdict(float)
        self._moved: dict[str, list[tuple[int, float]]] = {"load": [], "save": []}
        self._labels = dict(labels)
        self._prometheus = _prometheus(tuple(labels)) if exported else {}

    def add(self, name: str, amount: float = 1, kind: str = "") -> None:
        """Count; ``kind`` only for counters that have one."""
        if not amount:
            return
        with self._lock:
            self._values[f"{name}|{kind}" if kind else name] += amount
        counter = self._prometheus.get(name)
        if counter is not None:
            counter.labels(*self._labels.values(), *([kind] if kind else [])).inc(amount)

    def moved(
        self, what: str, results: npt.NDArray[np.uint8], page_bytes: int, seconds: float
    ) -> None:
        """``what``: ``"load"`` or ``"save"``; ``results``: one ``Status`` a page."""
        good = int((results == Status.OK).sum())
        self.add(f"{what}_pages", good)
        self.add(f"{what}_bytes", good * page_bytes)
        self.add(f"{what}_seconds", seconds)
        for status, count in zip(
            *np.unique(results[results != Status.OK], return_counts=True), strict=True
        ):
            self.add(f"{what}_failed_pages", int(count), Status(int(status)).name.lower())
        if good:
            rate = good * page_bytes / max(seconds, 1e-9) / 1e9
            with self._lock:
                self._moved[what] = [*self._moved[what], (good, rate)][-_HISTORY:]

    def snapshot(self) -> dict[str, float]:
        """All counters so far, ``name`` or ``name|kind``."""
        with self._lock:
            return dict(self._values)

    def take(self) -> Any:
        """SGLang's ``StorageMetrics`` of what was moved since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            moved, self._moved = self._moved, {"load": [], "save": []}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in moved["load"]],
            prefetch_bandwidth=[rate for _, rate in moved["load"]],
            backup_pgs=[pages for pages, _ in moved["save"]],
            backup_bandwidth=[rate for _, rate in moved["save"]],
        )


_registered: dict[tuple[str, ...], dict[str, Any]] = {}


def _prometheus(labels: tuple[str, ...]) -> dict[str, Any]:
    """The process's counters, made once: a backend may be attached again."""
    from prometheus_client import Counter

    if labels not in _registered:
        _registered[labels] = {
            name: Counter(
                f"ucm:ucm_{name}", text, labelnames=[*labels, *(["kind"] if has_kind else [])]
            )
            for name, (text, has_kind) in COUNTERS.items()
        }
    return _registered[labels]
