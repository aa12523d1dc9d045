"""Graphs as networkx sees them: the dependence graph, and the quotient graph of a partition.

Made for questions that networkx answers (cycles, longest paths, closures); linear sweeps use ``dependences``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import networkx as nx

from pygraph.ir import Graph, KernelNode
from pygraph.ir.annotations import Unit, unit_of
from pygraph.ir.order import dependences

__all__ = ["dependence_graph", "quotient_graph"]

if TYPE_CHECKING:
    Dependence: TypeAlias = nx.DiGraph[KernelNode]
    Quotient: TypeAlias = nx.DiGraph[Unit]


def dependence_graph(graph: Graph) -> Dependence:
    """What must run before what, nodes in program order. Computed once per version of the graph: do not change it."""
    return graph.cached(_dependence_graph)


def _dependence_graph(graph: Graph) -> Dependence:
    made: Dependence = nx.DiGraph()
    made.add_nodes_from(graph.nodes)
    made.add_edges_from(dependences(graph))
    return made


def quotient_graph(graph: Graph) -> Quotient:
    """The dependence graph with each region contracted to its index, in order of first members. No self-loops."""
    made: Quotient = nx.DiGraph()
    made.add_nodes_from(unit_of(node) for node in graph.nodes)
    edges = ((unit_of(first), unit_of(then)) for first, then in dependences(graph))
    made.add_edges_from((first, then) for first, then in edges if first != then)
    return made
