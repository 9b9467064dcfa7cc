"""The adapter: this engine's calls on one side, coordinator and stores of ``ucm_core`` on the other."""

from ucm_reference.cache.deployment import Deployment, open_deployment

__all__ = ["Deployment", "open_deployment"]
