"""Unit tests: real host pools, storage factory and page functions of SGLang; no model, no engine."""

from __future__ import annotations

import importlib.util
import warnings

if importlib.util.find_spec("sglang") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch and SGLang deprecate their own parts while importing
        import host_pools  # noqa: F401
        import trees  # noqa: F401
