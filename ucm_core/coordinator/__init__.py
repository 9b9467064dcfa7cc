"""The coordinator: decides hits from tables and answers. Touches no byte of KV, starts no transfer."""

from ucm_core.coordinator.checkpoints import CheckpointDirectory, new_positions
from ucm_core.coordinator.lookup import LookupPlan, Votes, combine, grid_positions, plan_lookup
from ucm_core.coordinator.resolve import HitPlan, Positions, Present, Reason, resolve_hit

__all__ = [
    "CheckpointDirectory",
    "HitPlan",
    "LookupPlan",
    "Positions",
    "Present",
    "Reason",
    "Votes",
    "combine",
    "grid_positions",
    "new_positions",
    "plan_lookup",
    "resolve_hit",
]
