"""UCM's reference engine: a small LLM engine with exact arithmetic for every kind of layer."""

from ucm_reference.engine import Engine
from ucm_reference.lockstep import LockstepExecutor
from ucm_reference.memory import Sizes
from ucm_reference.model import LayerRow, Model
from ucm_reference.models import MODELS
from ucm_reference.request import Request
from ucm_reference.scheduler import Limits
from ucm_reference.topology import Topology

__all__ = [
    "MODELS",
    "Engine",
    "LayerRow",
    "Limits",
    "LockstepExecutor",
    "Model",
    "Request",
    "Sizes",
    "Topology",
]
