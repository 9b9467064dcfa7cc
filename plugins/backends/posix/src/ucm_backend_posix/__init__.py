"""Storage stages of UCM that need no server."""

__version__ = "0.1.0"
