"""The constants of a namespace, as everyone who opens it must have them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from ucm_core.errors import ConfigError
from ucm_core.identity.encoding import encode

#: Version of everything that is fixed per namespace: id formats and the object header.
FORMAT_VERSION = 1
DEFAULT_BLOCK_TOKENS = 64
DEFAULT_NAME = "default"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS = ("format_version", "name", "block_tokens", "head_slices")


@dataclass(frozen=True, slots=True)
class Manifest:
    """``block_tokens``: tokens of a stored block and of one chain link. ``head_slices``: into how many
    objects the kv heads of a split group are cut. ``name`` is also the directory's name."""

    name: str
    block_tokens: int
    head_slices: int
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"namespace name {self.name!r} is not usable as a directory name: use 1 to 64 of "
                "letters, digits, '.', '_', '-', starting with a letter or digit"
            )
        for what, value in (("block_tokens", self.block_tokens), ("head_slices", self.head_slices)):
            if value < 1:
                raise ConfigError(f"{what} of namespace {self.name!r} must be >= 1, got {value}")

    @property
    def directory_name(self) -> str:
        """Path component below a cache root (or the prefix in a pool)."""
        return self.name

    @property
    def digest(self) -> bytes:
        """32 bytes for object headers and shared segment names:
        ``SHA-256("ucm/namespace/1" || encode(fields))``."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return hashlib.sha256(b"ucm/namespace/1" + encode(fields, "manifest")).digest()

    def to_bytes(self) -> bytes:
        """JSON for people, one trailing newline; a file without it is still being written."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps(fields, indent=2).encode() + b"\n"

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Parse what :meth:`to_bytes` wrote; ``where`` names it in errors. Raises ConfigError."""
        try:
            fields = json.loads(raw)
        except ValueError as e:
            raise ConfigError(f"{where}: not a manifest ({e}); {_REPAIR}") from e
        version = fields.get("format_version") if isinstance(fields, dict) else None
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{where}: format version {version!r}, this release reads and writes "
                f"{FORMAT_VERSION}; use another namespace or another directory, or the release "
                "that wrote it"
            )
        wrong = sorted(set(fields) ^ set(_FIELDS))
        numbers = (fields.get("block_tokens"), fields.get("head_slices"))
        if wrong or any(type(n) is not int for n in numbers):
            raise ConfigError(
                f"{where}: damaged (fields {sorted(fields)}, expected {sorted(_FIELDS)}, "
                f"block_tokens and head_slices integers); {_REPAIR}"
            )
        return cls(**fields)

    def check(
        self, where: str, *, block_tokens: int | None = None, head_slices: int | None = None
    ) -> None:
        """Refuse settings that contradict what was written; None accepts whatever is there."""
        problems = [
            f"{where}: namespace {self.name!r} was written with {what} {have}, this start asks for "
            f"{want}; set {what} to {have}, or choose another namespace name, or clear it"
            for what, have, want in (
                ("block_tokens", self.block_tokens, block_tokens),
                ("head_slices", self.head_slices, head_slices),
            )
            if want is not None and want != have
        ]
        if problems:
            raise ConfigError("; ".join(problems), tuple(problems))


_REPAIR = "if nothing uses the directory any more, remove it; its objects cannot be trusted"
