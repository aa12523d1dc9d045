"""Queries on a graph, for passes and reports: dependences by position, contents of regions, device times of nodes.

node.meta[REGION]   0 0 1 – 1     region_views(graph)[1]: nodes 2 and 4, the values they read and return
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pygraph.ir import EAGER, REGION, DeviceModel, Graph, KernelNode, TensorType, Value
from pygraph.ir.cost import evaluate
from pygraph.ir.order import dependences
from pygraph.passes.region_order import Kind, runs


def dependence_lists(graph: Graph) -> tuple[list[list[int]], list[list[int]]]:
    """For the node at each position, the positions that it must follow, and the positions that must follow it."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    before: list[list[int]] = [[] for _ in place]
    after: list[list[int]] = [[] for _ in place]
    for first, then in dependences(graph):
        before[place[then]].append(place[first])
        after[place[first]].append(place[then])
    return before, after


@dataclass(frozen=True, slots=True)
class RegionView:
    """One region.

    Args:
        nodes: in program order
        reads: values from outside, in order of first use
        results: values that are used outside, or returned, in order of definition
        launches: number of launches, without those of nodes that the region calls; None if unknown
        segments: number of runs of launches without such calls between them
    """

    nodes: Sequence[KernelNode]
    reads: Sequence[Value]
    results: Sequence[Value]
    launches: float | None
    segments: int


def region_views(graph: Graph) -> dict[int, RegionView]:
    """The regions of ``graph`` by index, in order of their first node; launches are evaluated with its hints."""
    members: dict[int, list[KernelNode]] = {}
    for node in graph.nodes:
        index = node.meta.get(REGION)
        if index is not None:
            members.setdefault(index, []).append(node)
    returned = frozenset(graph.output_values)
    return {index: _view(nodes, returned, graph.hints) for index, nodes in members.items()}


def _view(nodes: Sequence[KernelNode], returned: frozenset[Value], values: Mapping[str, int]) -> RegionView:
    inside = frozenset(nodes)
    reads = dict.fromkeys(value for node in nodes for value in node.inputs if value.producer not in inside)
    made = [value for node in nodes for value in node.outputs]
    results = [value for value in made if value in returned or any(user not in inside for user in value.users)]
    called = [node.meta.get(EAGER) is True for node in nodes]
    launches = [0.0 if eager else evaluate(n.cost.launches, values) for n, eager in zip(nodes, called, strict=True)]
    pairs = zip(called, launches, strict=True)
    kinds = [Kind.OUTSIDE if eager else Kind.FREE if count == 0 else Kind.LAUNCHES for eager, count in pairs]
    return RegionView(nodes, list(reads), results, known_sum(launches), len(runs(kinds)))


def known_sum(counts: Iterable[float | None]) -> float | None:
    """The sum, or None if a summand is unknown."""
    found = list(counts)
    return None if None in found else sum((count for count in found if count is not None), 0.0)


_PRODUCTS = frozenset(
    {"addbmm", "addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "bmm", "linear", "matmul", "mm"}
    | {"_int_mm", "_scaled_mm", "_mkl_linear", "_linear_pointwise"}
)
_PRODUCT_PARTS = ("convolution", "_scaled_dot_product")


def node_time_us(node: KernelNode, model: DeviceModel, values: Mapping[str, int]) -> float | None:
    """Device time of ``node`` in µs, or None if its cost is unknown.

    For matrix products, convolutions and attention, the rate depends on the element type of the first tensor operand,
    or of the first tensor result if there is no such operand.
    """
    name = node.op.partition(".")[2]
    dtype = None
    if name.partition(".")[0] in _PRODUCTS or any(part in name for part in _PRODUCT_PARTS):
        types = (value.type for value in (*node.inputs, *node.outputs))
        dtype = next((type.dtype.value for type in types if isinstance(type, TensorType)), None)
    return model.time_us(node.cost, values, dtype)
