"""Layer, unit, group and the spec table that ties them: what a model keeps, as data."""

from ucm_core.spec.coordinates import Coordinate, Stages, head_slices, rank_heads
from ucm_core.spec.describe import describe
from ucm_core.spec.group import GroupSpec, Retention
from ucm_core.spec.keyspace import KeySpace, SeededCoordinate
from ucm_core.spec.kinds import STORED, Kind, RankRule, Unit
from ucm_core.spec.layer import LayerSpec, layers_from_lists
from ucm_core.spec.table import SpecTable
from ucm_core.spec.unit import UnitSpec, units

__all__ = [
    "STORED",
    "Coordinate",
    "GroupSpec",
    "KeySpace",
    "Kind",
    "LayerSpec",
    "RankRule",
    "Retention",
    "SeededCoordinate",
    "SpecTable",
    "Stages",
    "Unit",
    "UnitSpec",
    "describe",
    "head_slices",
    "layers_from_lists",
    "rank_heads",
    "units",
]
