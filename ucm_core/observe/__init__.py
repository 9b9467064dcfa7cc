"""What the system tells about itself: metrics and logs that cannot flood."""

from ucm_core.observe.logs import RateLimitedLogger
from ucm_core.observe.metrics import StoreCollector

__all__ = ["RateLimitedLogger", "StoreCollector"]
