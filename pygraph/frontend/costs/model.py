"""The cost of one node: its operator's formula where there is one, else by class (views, pointwise), else UNKNOWN."""

from __future__ import annotations

from functools import cache

from pygraph.frontend.call import tags_of
from pygraph.frontend.costs import attention, convolution, elementwise, matmul, memory
from pygraph.frontend.costs.registry import COSTS, FLOPS
from pygraph.frontend.costs.traffic import plain
from pygraph.frontend.names import FrontendError, is_symbolic, resolve_op
from pygraph.frontend.views import VIEWS
from pygraph.ir import CONSTANT, FREE, UNKNOWN, Cost, Graph, GraphRef, KernelNode, base_name
from pygraph.ir.cost import total

__all__ = ["cost_of"]

FORMULAS = (attention, convolution, elementwise, matmul, memory)
"""The files whose formulas are registered by being imported here."""

_RUNS_SUBGRAPH = ("hop.invoke_subgraph", "hop.tag_activation_checkpoint")


def cost_of(node: KernelNode, graph: Graph | None = None) -> Cost:
    """The cost of ``node``; that of a call of a subgraph is the sum of the subgraph's nodes, looked up in ``graph``."""
    base = base_name(node.op)
    for name in (base, base.rstrip("_")):
        if name in COSTS:
            return COSTS[name](node)
        if name in FLOPS:
            return plain(node, FLOPS[name](node))
    if is_symbolic(node.op) or base in VIEWS or base == CONSTANT:
        return FREE
    if base.startswith("aten._foreach_") or _is_pointwise(node.op):
        return plain(node, elementwise.pointwise_flops(node))
    return _of_subgraph(node, graph) if base in _RUNS_SUBGRAPH and graph is not None else UNKNOWN


@cache
def _is_pointwise(op: str) -> bool:
    try:
        return "pointwise" in tags_of(resolve_op(op))
    except FrontendError:
        return False


def _of_subgraph(node: KernelNode, graph: Graph) -> Cost:
    called = [graph.subgraphs[arg.name] for arg in node.args if isinstance(arg, GraphRef)]
    return total(inner.cost for sub in called for inner in sub.nodes)
