"""One strict configuration, from a YAML file or inline keys: ``ucm_core.config.load.load_config``.

What plugins and the store need to declare options is here; the loader, which needs both, is not.
"""

from ucm_core.config.machine import Machine
from ucm_core.config.options import Chosen, CoreOptions, Options

__all__ = ["Chosen", "CoreOptions", "Machine", "Options"]
