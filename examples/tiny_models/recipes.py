"""What a generated model is: a configuration, and the tensors it implies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: Raise when the meaning of a recipe changes without its data changing.
RECIPE_VERSION = 1


@dataclass(frozen=True)
class TensorRecipe:
    """One tensor: normal with standard deviation ``std``, or the constant ``value`` when std is 0."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class ModelRecipe:
    """``family`` picks the tensor list; ``config`` is the content of config.json."""

    family: str
    config: Mapping[str, Any]
    seed: int = 7
    gains: Mapping[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Storage dtype of the weights: ``float32`` or ``bfloat16``."""
        return str(self.config["torch_dtype"])

    def with_config(self, **changes: Any) -> ModelRecipe:
        """The same weights under another configuration (rope factor, dtype, ...)."""
        return replace(self, config={**self.config, **changes})

    def digest(self) -> str:
        """12 hex digits that change whenever any byte of the checkpoint would."""
        facts = [RECIPE_VERSION, self.family, self.config, self.seed, self.gains]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
