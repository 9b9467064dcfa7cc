"""One strict configuration, from a YAML file or inline keys."""

from ucm_core.config.options import CoreOptions, Options

__all__ = ["CoreOptions", "Options"]
