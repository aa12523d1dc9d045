"""``pygraph.graph``: any callable, captured as it runs and replayed with today's tensors."""

from pygraph.graphs.callable import Graph, GraphRecord, graph

__all__ = ["Graph", "GraphRecord", "graph"]
