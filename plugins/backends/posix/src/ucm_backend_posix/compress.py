"""The stage `Compress`: options, and the factory of the native stage."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from ucm_core import _native
from ucm_core.config.options import Options
from ucm_core.config.units import GibAsBytes
from ucm_core.errors import ConfigError
from ucm_core.registry import HostMemory, StageContext

CODECS = ("zstd", "lz4", "none")


class CompressConfig(Options):
    """Lossless compression of what the stages below keep; content and identity stay the same."""

    compress_codec: Literal["zstd", "lz4", "none"] = Field(
        "zstd",
        description="zstd, lz4 (several times faster, saves much less on KV), or none: write blocks as "
        "they are and still read compressed ones. Lossless only.",
    )
    compress_level: int = Field(
        1,
        ge=-7,
        le=19,
        description="zstd: -7 (fastest) to 19 (smallest), 0 is not a level. lz4: 1, or -n for the "
        "acceleration n.",
    )
    compress_element_bytes: Literal[0, 1, 2, 4, 8] = Field(
        0,
        description="Bytes of one element, which are compressed as separate planes. 0: as the layout "
        "of the blocks says, else 2.",
    )
    compress_threads: int = Field(
        0,
        ge=0,
        le=64,
        description="Threads per worker that compress and decompress; 0: a quarter of the CPUs, "
        "between 1 and 8.",
    )
    compress_buffer_gb: GibAsBytes = Field(
        256 << 20,
        ge=0,
        description="Memory per worker for blocks on their way to be written, compressed; at least two "
        "blocks whatever this says.",
    )

    @field_validator("compress_codec", mode="before")
    @classmethod
    def _lossless(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in CODECS:
            raise ValueError(
                f"'{value}' is not offered: only the lossless codecs {', '.join(CODECS)} are. A lossy one "
                "would change the bytes a model computes with, and so the identity of every block"
            )
        return value

    @field_validator("compress_level")
    @classmethod
    def _a_level(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 is not a level: use 1, or a negative one to be faster")
        return value


def host_memory(config: CompressConfig) -> HostMemory:
    """What the stage may allocate, apart from its threads' working memory of about one layer each."""
    return HostMemory(per_rank_bytes=config.compress_buffer_gb)


def build_compress(context: StageContext, config: CompressConfig, below: Any) -> Any:
    """The stage over ``below``. Raises ``ConfigError`` when that one cannot keep shorter blocks."""
    del context
    try:
        return _native.compress_stage(
            below,
            codec=config.compress_codec,
            level=config.compress_level,
            element_bytes=config.compress_element_bytes,
            threads=config.compress_threads,
            buffer_bytes=config.compress_buffer_gb,
        )
    except _native.CompressSetupError as error:
        raise ConfigError(str(error)) from error
