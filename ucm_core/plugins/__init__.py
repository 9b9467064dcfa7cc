"""Plugin host: finds plugins, checks them, isolates their failures, and reports."""

from ucm_core.plugins.discover import Candidate, discover
from ucm_core.plugins.host import PluginHost
from ucm_core.plugins.report import PluginReport, PluginStatus

__all__ = ["Candidate", "PluginHost", "PluginReport", "PluginStatus", "discover"]
