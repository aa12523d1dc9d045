"""``pygraph.graph``: any callable, captured as it runs and replayed with today's tensors. ``pygraph.loop``: a step,
which one replay runs many times."""

from pygraph.graphs.callable import Graph, GraphRecord, graph
from pygraph.graphs.loops import Looped, loop

__all__ = ["Graph", "GraphRecord", "Looped", "graph", "loop"]
