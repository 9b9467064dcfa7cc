"""The one error tree. A message says what, which key or path, expected and got, and what to do."""

from __future__ import annotations


class UcmError(Exception):
    """Base of every error raised by the project and its plugins."""


class ConfigError(UcmError):
    """The configuration is wrong. ``problems`` lists every problem found, not only the first."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


class PluginError(UcmError):
    """A plugin cannot be used."""


class PluginLoadError(PluginError):
    """The plugin's module could not be imported or its hooks failed."""


class PluginVersionError(PluginError):
    """The plugin was built for another plugin API version."""


class PluginConflictError(PluginError):
    """Two plugins register the same name; the message names both owners."""


class StoreError(UcmError):
    """A store operation could not be carried out."""


class CorruptError(StoreError):
    """Stored bytes failed verification."""


class FullError(StoreError):
    """No room: a queue, a buffer or the medium is full."""


class StoreTimeoutError(StoreError):
    """The operation did not end within its bound."""


class ClosedError(StoreError):
    """The store was shut down, or is used in a process that did not set it up (after fork)."""


class UnsupportedError(UcmError):
    """The combination asked for is not supported; the message says why and what to choose."""
