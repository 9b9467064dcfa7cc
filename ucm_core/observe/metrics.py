"""Counters of stores as Prometheus metrics, in a registry that the caller hands in."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ucm_core.observe.logs import RateLimitedLogger

Stats = Callable[[], Mapping[str, int]]

_log = RateLimitedLogger(logging.getLogger("ucm.metrics"))
_BAD = re.compile(r"[^a-zA-Z0-9_]")
_ERRORS = "ucm_store_collect_errors"


class StoreCollector(Collector):
    """Exports ``BlockStore.stats()`` of the stores of this process when the registry is scraped.

    ``<stage>.<name>`` becomes ``ucm_store_<stage>_<name>`` with the label ``store``; names ending in
    ``_total`` are counters, the others gauges. One collector per registry: a second one is refused
    by the registry, so nothing is exported twice. A store whose ``stats`` raises is counted in
    ``ucm_store_collect_errors_total`` and does not hide the others. Thread-safe.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, Stats] = {}
        self._errors = 0
        registry.register(self)

    def add(self, store: str, stats: Stats) -> None:
        """Export ``stats`` under the label ``store``; raises ``ValueError`` for a name in use."""
        with self._lock:
            if store in self._stores:
                raise ValueError(f"a store named '{store}' is exported already")
            self._stores[store] = stats

    def remove(self, store: str) -> None:
        """Stop exporting; unknown names are fine, so that closing twice is."""
        with self._lock:
            self._stores.pop(store, None)

    def describe(self) -> Iterable[Metric]:
        """What the registry uses to refuse a second collector."""
        return [self._error_metric()]

    def collect(self) -> Iterable[Metric]:
        """Called by the registry on each scrape."""
        with self._lock:
            stores = dict(self._stores)
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for store, stats in stores.items():
            try:
                values = dict(stats())
            except Exception as error:
                self._errors += 1
                _log.warning("stats", "counters of store '%s' cannot be read: %s", store, error)
                continue
            for key, value in values.items():
                name = metric_name(key)
                if name not in families:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    families[name] = kind(name, f"{key} of a store's stage", labels=["store"])
                families[name].add_metric([store], value)
        return [*families.values(), self._error_metric()]

    def _error_metric(self) -> Metric:
        text = "Scrapes in which a store's counters could not be read"
        return CounterMetricFamily(_ERRORS, text, value=self._errors)


def metric_name(key: str) -> str:
    """``posix.read_bytes_total`` -> ``ucm_store_posix_read_bytes_total``."""
    return "ucm_store_" + _BAD.sub("_", key).lower()
