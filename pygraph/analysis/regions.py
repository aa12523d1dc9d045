"""What a partitioned graph's regions consist of: members, values that come in and go out, addresses in use.

Read from the nodes' REGION annotation each time, as annotations do not count as mutations. What to do with it is
decided in ``pygraph.passes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pygraph.ir import REGION, Graph, KernelNode, Value
from pygraph.ir.cost import evaluate

__all__ = ["Addresses", "RegionView", "region_addresses", "region_views"]


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
