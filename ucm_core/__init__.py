"""UCM core: identity, spec table, coordinator, store contract, plugin host. Imports no engine."""

__version__ = "0.1.0"
