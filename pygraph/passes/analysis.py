"""What passes and reports ask of a graph: dependences by position, what regions consist of, device times of nodes.

node.meta[REGION]   0 0 1 – 1     region_views(graph)[1]: nodes 2 and 4, the values they read and return
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pygraph.ir import REGION, DeviceModel, Graph, KernelNode, TensorType, Value
from pygraph.ir.cost import evaluate
from pygraph.ir.order import dependences

__all__ = [
    "Addresses",
    "Dependences",
    "RegionView",
    "arithmetic",
    "dependence_lists",
    "node_time_us",
    "region_addresses",
    "region_views",
]


@dataclass(frozen=True, slots=True)
class Dependences:
    """For the node at each position, the positions that it must follow, and those that must follow it."""

    before: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]


def dependence_lists(graph: Graph) -> Dependences:
    """The dependences of ``graph`` by position in ``graph.nodes``; computed once per version of the graph."""
    return graph.cached(_dependence_lists)


def _dependence_lists(graph: Graph) -> Dependences:
    place = {node: i for i, node in enumerate(graph.nodes)}
    before: list[list[int]] = [[] for _ in place]
    after: list[list[int]] = [[] for _ in place]
    for first, then in dependences(graph):
        before[place[then]].append(place[first])
        after[place[first]].append(place[then])
    return Dependences(before, after)


# -- regions -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RegionView:
    """One region: its nodes in program order, what it reads from outside, and which results are used outside.

    Both kinds of values are in order of first use or definition; a returned value counts as used outside.
    """

    nodes: list[KernelNode] = field(default_factory=list)
    reads: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)


def region_views(graph: Graph) -> dict[int, RegionView]:
    """The regions of ``graph`` by index, in order of their first node."""
    views: dict[int, RegionView] = {}
    for node in graph.nodes:
        index = node.meta.get(REGION)
        if index is not None:
            views.setdefault(index, RegionView()).nodes.append(node)
    returned = frozenset(graph.output_values)
    for view in views.values():
        _fill(view, returned)
    return views


def _fill(view: RegionView, returned: frozenset[Value]) -> None:
    inside = frozenset(view.nodes)
    used = (value for node in view.nodes for value in node.inputs)
    view.reads = list(dict.fromkeys(value for value in used if value.producer not in inside))
    made = (value for node in view.nodes for value in node.outputs)
    view.results = [value for value in made if value in returned or any(user not in inside for user in value.users)]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Who uses which memory inside a region. Memory goes by the value that brings it in or makes it there.

    owners   for each value in sight, the values whose memory it may lie in (several, where an alias is ambiguous)
    uses     launches that are given an address in that memory; None when a launch count is unknown
    """

    owners: Mapping[Value, tuple[Value, ...]]
    uses: Mapping[Value, float | None]


def region_addresses(view: RegionView, values: Mapping[str, int]) -> Addresses:
    """The addresses that the launches of ``view`` are given; launch counts are evaluated with ``values``."""
    owners: dict[Value, tuple[Value, ...]] = {value: (value,) for value in view.reads}
    uses: dict[Value, float | None] = dict.fromkeys(view.reads, 0.0)
    for node in view.nodes:
        _define(node, owners, uses)
        launches = evaluate(node.cost.launches, values)
        for owner in _owners_of((*node.inputs, *node.outputs), owners):
            uses[owner] = _add(uses[owner], launches)
    return Addresses(owners, uses)


def _define(node: KernelNode, owners: dict[Value, tuple[Value, ...]], uses: dict[Value, float | None]) -> None:
    for index, output in enumerate(node.outputs):
        sources = [node.inputs[operand] for position, operand in node.effects.aliases if position == index]
        owners[output] = tuple(_owners_of(sources, owners)) or (output,)
        if not sources:
            uses[output] = 0.0


def _owners_of(values: Sequence[Value], owners: Mapping[Value, tuple[Value, ...]]) -> dict[Value, None]:
    return dict.fromkeys(owner for value in values for owner in owners[value])


def _add(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


# -- time --------------------------------------------------------------------------------------------------------------

_PRODUCTS = (
    "addbmm",
    "addmm",
    "addmm_",
    "_addmm_activation",
    "baddbmm",
    "baddbmm_",
    "bmm",
    "linear",
    "matmul",
    "mm",
    "_int_mm",
    "_scaled_mm",
    "_mkl_linear",
    "_linear_pointwise",
)
_PRODUCT_PARTS = ("convolution", "_scaled_dot_product")


def node_time_us(node: KernelNode, model: DeviceModel, values: Mapping[str, int]) -> float | None:
    """Device time of ``node`` in µs, or None where its cost is unknown."""
    return model.time_us(node.cost, values, arithmetic(node))


def arithmetic(node: KernelNode) -> str | None:
    """The element type of matrix products, convolutions and attention: that of what they take, or return where they
    take no tensor. None for the rest."""
    if not _is_product(node.op):
        return None
    found = (value.type for value in (*node.inputs, *node.outputs))
    return next((type.dtype.value for type in found if isinstance(type, TensorType)), None)


def _is_product(op: str) -> bool:
    _, _, name = op.partition(".")
    return name.partition(".")[0] in _PRODUCTS or any(part in name for part in _PRODUCT_PARTS)
