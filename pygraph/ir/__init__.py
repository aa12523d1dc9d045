"""The IR: values, kernel nodes, graphs, costs, text. Imports sympy, networkx and ``pygraph.errors``, never torch."""

from pygraph.ir import annotations, cost, effects, graph, node, types
from pygraph.ir.annotations import *  # noqa: F403 - each of these files says itself which of its names are public
from pygraph.ir.cost import *  # noqa: F403
from pygraph.ir.dims import canonical
from pygraph.ir.effects import *  # noqa: F403
from pygraph.ir.graph import *  # noqa: F403
from pygraph.ir.node import *  # noqa: F403
from pygraph.ir.order import dependences, memory_roots
from pygraph.ir.text.parse import parse_graph
from pygraph.ir.types import *  # noqa: F403
from pygraph.ir.verify import verify

__all__ = ["canonical", "dependences", "memory_roots", "parse_graph", "verify"]
__all__ += [*annotations.__all__, *cost.__all__, *effects.__all__, *graph.__all__, *node.__all__, *types.__all__]
