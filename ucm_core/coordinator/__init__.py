"""The coordinator: decides hits from tables and answers. Touches no byte of KV, starts no transfer."""

from ucm_core.coordinator.budget import CheckpointBudget, budgeted_checkpoints
from ucm_core.coordinator.checkpoints import CheckpointDirectory
from ucm_core.coordinator.coordinator import Coordinator
from ucm_core.coordinator.lookup import LookupPlan, Votes, combine, grid_positions, plan_lookup
from ucm_core.coordinator.prefixes import PrefixSketch
from ucm_core.coordinator.resolve import HitPlan, Positions, Present, Reason, resolve_hit
from ucm_core.coordinator.retention import Computation, DefaultRetention, RetentionPolicy

__all__ = [
    "CheckpointBudget",
    "CheckpointDirectory",
    "Computation",
    "Coordinator",
    "DefaultRetention",
    "HitPlan",
    "LookupPlan",
    "Positions",
    "PrefixSketch",
    "Present",
    "Reason",
    "RetentionPolicy",
    "Votes",
    "budgeted_checkpoints",
    "combine",
    "grid_positions",
    "plan_lookup",
    "resolve_hit",
]
