"""SGLang adapter of UCM. Importing this package imports no part of SGLang."""

__version__ = "0.1.0"
