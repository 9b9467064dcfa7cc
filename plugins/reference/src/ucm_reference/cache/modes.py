"""How loads and saves meet compute, from the operator's option; what cannot be is refused at start."""

from __future__ import annotations

from dataclasses import dataclass

from ucm_core.config.options import CoreOptions
from ucm_core.errors import UnsupportedError
from ucm_core.spec import STORED, SpecTable


@dataclass(frozen=True, slots=True)
class Modes:
    """``layered_loads``: a request computes in the step that loads it, layer by layer; else it runs when all
    is in place. ``layered_saves``: each unit is saved when its last layer has run; else all at the end of
    the step. ``look_ahead``: layers, None: measured."""

    layered_loads: bool = False
    layered_saves: bool = False
    look_ahead: int | None = None

    @property
    def held_back(self) -> bool:
        """What a step saves is published only when every rank's loads of that step were good."""
        return self.layered_loads

    @classmethod
    def of(cls, core: CoreOptions, table: SpecTable) -> Modes:
        """Raises UnsupportedError where a failed load could not be told in time."""
        choice = core.use_layerwise
        rows = [row for row in table.rows if row.kind in STORED]
        if choice is True and (len(rows) != 1 or not continues_anywhere(table)):
            raise UnsupportedError(
                f"use_layerwise: loads layer by layer need one stored row without a window, this model has "
                f"{', '.join(row.name for row in rows)}: after a bad load it could only start over. "
                'Saves alone can be layer by layer: use_layerwise: "save"'
            )
        return cls(choice is True, choice is True or choice == "save", core.layerwise_look_ahead)


def continues_anywhere(table: SpecTable) -> bool:
    """A request can go on from any block's start: nothing it reads there is a state, or a window that was
    not loaded for it."""
    return not table.snapshots and all(row.window is None for row in table.chains)
