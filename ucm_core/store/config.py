"""Options of the store itself, the same whatever stages a pipeline has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from ucm_core.config.machine import Machine
from ucm_core.config.options import Chosen, Options
from ucm_core.config.units import GIB, GibAsBytes, Milliseconds, format_size


class HealthConfig(Options):
    """The health wrapper around every stage that reaches a medium (native/include/ucm/guard_stage.h)."""

    enabled: bool = Field(
        True,
        description="Probe each storage stage (write, read, compare, delete) and take one that does not "
        "work out of service: its loads are misses and its dumps are refused at once.",
    )
    interval_ms: Milliseconds = Field(10_000, description="Time between two probes.")
    timeout_ms: Milliseconds = Field(
        3_000, description="A probe that takes longer has failed, whatever it says later."
    )
    window: int = Field(
        8,
        gt=0,
        le=64,
        description="Probes that count. As many good ones in a row put a stage back into service.",
    )
    failures: int = Field(
        2, gt=0, le=64, description="Failed probes in the window that take a stage out of service."
    )

    @model_validator(mode="after")
    def _consistent(self) -> HealthConfig:
        if self.failures > self.window:
            raise ValueError(
                f"failures is {self.failures}, but only {self.window} probes (window) count: no stage "
                "would ever be taken out; set failures to at most window"
            )
        return self


class StoreConfig(Options):
    """Bounds of one store; every queue and every wait of it is one of these."""

    timeout_ms: Milliseconds = Field(
        30_000,
        description="A store task that is not done by then fails; per task, not per request.",
    )
    waiting_queue_depth: int = Field(
        16_384,
        gt=0,
        description="Objects that may wait for a buffer, per direction; beyond it refused.",
    )
    running_queue_depth: int = Field(256, gt=0, description="Loads that hold a buffer at one time.")
    dump_retries: int = Field(
        2, ge=0, le=16, description="Tries after the first when a stage fails to write an object."
    )
    store_health: HealthConfig = Field(
        default_factory=lambda: HealthConfig.model_validate({}),
        description="The health wrapper; `{enabled: false}` turns it off.",
    )
    copy_threads: int = Field(
        1,
        gt=0,
        le=64,
        description="Threads per worker that copy between engine memory and buffers.",
    )
    staging_buffer_gb: GibAsBytes = Field(
        GIB,
        gt=0,
        description="Host memory per worker for objects on their way (pipelines without a host "
        "cache). Default: 1/32 of the available memory, between 128 MiB and 4 GiB.",
    )

    @classmethod
    def choose(cls, given: Mapping[str, Any], machine: Machine) -> Mapping[str, Chosen]:
        available = machine.available_memory_bytes
        size = min(max(available // 32, GIB // 8), 4 * GIB) >> 20 << 20
        reason = f"1/32 of {format_size(available)} available, within 128 MiB and 4 GiB"
        return {"staging_buffer_gb": Chosen(f"{size >> 20} MiB", reason)}
