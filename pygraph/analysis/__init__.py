"""Read-only questions asked of a Graph. Nothing here changes a graph or decides anything."""

from pygraph.analysis.critical_path import CriticalPath, critical_path
from pygraph.analysis.dependences import Dependences, dependence_lists
from pygraph.analysis.liveness import last_uses, peak_bytes
from pygraph.analysis.regions import Addresses, RegionView, region_addresses, region_views
from pygraph.analysis.views import dependence_graph, quotient_graph

__all__ = [
    "Addresses",
    "CriticalPath",
    "Dependences",
    "RegionView",
    "critical_path",
    "dependence_graph",
    "dependence_lists",
    "last_uses",
    "peak_bytes",
    "quotient_graph",
    "region_addresses",
    "region_views",
]
