"""What an operator chose of retention, as coordinator and spec table take it. Every adapter uses it alike."""

from __future__ import annotations

from dataclasses import dataclass

from ucm_core.config.options import CoreOptions
from ucm_core.coordinator import RetentionPolicy
from ucm_core.plugins import PluginHost
from ucm_core.spec import Retention


@dataclass(frozen=True, slots=True)
class RetentionChoice:
    """``interval``, ``budget_bytes``: None where the operator said nothing. ``policy``: None is the default
    rule; it decides for one deployment, on its scheduler's thread."""

    interval: int | None = None
    budget_bytes: int | None = None
    policy: RetentionPolicy | None = None

    @classmethod
    def of(cls, core: CoreOptions, host: PluginHost) -> RetentionChoice:
        """Raises PluginError for a rule that nobody registers (the loader has said so before)."""
        name = core.retention_rule
        policy = None if name == "default" else host.retention(name).build()
        return cls(core.retention_interval, core.retention_budget_gb, policy)

    def of_row(self, interval: int | None) -> Retention:
        """Of a snapshot row whose engine or model has ``interval`` tokens between states."""
        return Retention(self.interval or interval, budget_bytes=self.budget_bytes)
