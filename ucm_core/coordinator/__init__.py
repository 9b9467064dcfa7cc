"""The coordinator: decides hits from tables and answers. Touches no byte of KV, starts no transfer."""

from ucm_core.coordinator.lookup import LookupPlan, Votes, combine, grid_positions, plan_lookup
from ucm_core.coordinator.resolve import HitPlan, Positions, Present, Reason, resolve_hit

__all__ = [
    "HitPlan",
    "LookupPlan",
    "Positions",
    "Present",
    "Reason",
    "Votes",
    "combine",
    "grid_positions",
    "plan_lookup",
    "resolve_hit",
]
