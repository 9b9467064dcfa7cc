"""Layer, unit, group and the spec table that ties them: what a model keeps, as data."""

from ucm_core.spec.attention import attention_layer
from ucm_core.spec.coordinates import Coordinate, Stages, head_slices, rank_heads
from ucm_core.spec.describe import describe
from ucm_core.spec.group import GroupSpec, Retention
from ucm_core.spec.keyspace import KeySpace, SeededCoordinate, SnapshotKey
from ucm_core.spec.kinds import STORED, Kind, RankRule, Unit
from ucm_core.spec.layer import TARGET, LayerSpec, layers_from_lists
from ucm_core.spec.table import SpecTable
from ucm_core.spec.unit import ObjectShape, UnitSpec, object_shape, units

__all__ = [
    "STORED",
    "TARGET",
    "Coordinate",
    "GroupSpec",
    "KeySpace",
    "Kind",
    "LayerSpec",
    "ObjectShape",
    "RankRule",
    "Retention",
    "SeededCoordinate",
    "SnapshotKey",
    "SpecTable",
    "Stages",
    "Unit",
    "UnitSpec",
    "attention_layer",
    "describe",
    "head_slices",
    "layers_from_lists",
    "object_shape",
    "rank_heads",
    "units",
]
