"""The dependences of a graph as lists over positions in program order, which linear algorithms walk.

``pygraph.ir.order`` says what the dependences are; ``views`` makes networkx graphs of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pygraph.ir import Graph
from pygraph.ir.order import dependences

__all__ = ["Dependences", "dependence_lists"]


@dataclass(frozen=True, slots=True)
class Dependences:
    """For the node at each position, the positions that it must follow, and those that must follow it."""

    before: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]


def dependence_lists(graph: Graph) -> Dependences:
    """The dependences of ``graph`` by position in ``graph.nodes``; computed once per version of the graph."""
    return graph.cached(_compute)


def _compute(graph: Graph) -> Dependences:
    place = {node: i for i, node in enumerate(graph.nodes)}
    before: list[list[int]] = [[] for _ in place]
    after: list[list[int]] = [[] for _ in place]
    for first, then in dependences(graph):
        before[place[then]].append(place[first])
        after[place[first]].append(place[then])
    return Dependences(before, after)
