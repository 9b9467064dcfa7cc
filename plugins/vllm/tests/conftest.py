"""Makes what the tests share importable: their support modules and the generated models."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent
for _path in (_TESTS.parents[2] / "examples", _TESTS / "support"):
    if str(_path) not in sys.path:
        sys.path.insert(0, str(_path))
