"""``python -m tiny_models [NAME ...]``: write checkpoints and print where they are."""

from __future__ import annotations

import sys

from tiny_models import MODELS, ensure_model

for wanted in sys.argv[1:] or MODELS:
    print(ensure_model(wanted))
