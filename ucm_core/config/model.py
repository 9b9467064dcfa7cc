"""The finished configuration: typed, complete, and for each value where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ucm_core.config.options import CoreOptions
from ucm_core.config.units import display
from ucm_core.registry import PipelineSpec
from ucm_core.store.config import StoreConfig


@dataclass(frozen=True, slots=True)
class Entry:
    """One effective value. ``section``: "core", "store" or a stage's name; ``source``: "default",
    "chosen: ...", "inline", or ``<file>:<line>``; ``shown``: the value with its unit."""

    section: str
    key: str
    value: Any
    source: str
    help: str
    shown: str


@dataclass(frozen=True, slots=True)
class UcmConfig:
    """What ``load_config`` returns; immutable. ``stages`` holds each stage's validated option model
    by stage name, top of the pipeline first. ``warnings`` were not fatal and must be logged once."""

    core: CoreOptions
    store: StoreConfig
    pipeline: PipelineSpec
    stages: Mapping[str, BaseModel]
    origin: str
    sources: Mapping[tuple[str, str], str]
    warnings: tuple[str, ...] = ()

    def entries(self) -> Iterator[Entry]:
        """Every effective value, in the order in which ``ucm config`` prints them."""
        source = self.sources.get(("pipeline", "store_pipeline"), "default")
        name = self.pipeline.name
        yield Entry("pipeline", "store_pipeline", name, source, self.pipeline.summary, name)
        sections = [("core", self.core), ("store", self.store), *self.stages.items()]
        for section, model in sections:
            for key, info in type(model).model_fields.items():
                value = getattr(model, key)
                yield Entry(
                    section,
                    key,
                    value,
                    self.sources.get((section, key), "default"),
                    info.description or "",
                    display(info, value),
                )
