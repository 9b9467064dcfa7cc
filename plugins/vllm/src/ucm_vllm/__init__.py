"""vLLM adapter of UCM. Importing this package imports no part of vLLM."""

__version__ = "0.1.0"
