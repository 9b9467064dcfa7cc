"""The module that vLLM imports by name. A vLLM that does not fit is answered with words, not a trace.

The connector's own module imports what the supported releases have; in another one an import may
fail, or vLLM may ask its connectors for a method that nobody has written here.
"""

from __future__ import annotations

from typing import Any

from ucm_vllm.versions import load_connector

UCMConnector: type[Any] = load_connector()
