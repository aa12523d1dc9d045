"""``pygraph.graph``: any callable, captured as it runs and replayed with the tensors of each call. ``pygraph.loop``: a
step that one replay runs many times."""

from pygraph.graphs.callable import Graph, GraphRecord, graph
from pygraph.graphs.loops import Looped, loop

__all__ = ["Graph", "GraphRecord", "Looped", "graph", "loop"]
