"""The spec table of a model from its published ``config.json``: rules as data, no model in code."""

from ucm_core.spec.from_config.read import DRAFT, PublishedModel, read_model_config

__all__ = ["DRAFT", "PublishedModel", "read_model_config"]
