"""Rules of structure, which hold at every stage: names, links, order, effects, types.

Each rule yields ``(node, reason)`` for whatever breaks it. Rules of judged and partitioned graphs: ``region_rules``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeAlias

import sympy

from pygraph.ir.dims import canonical
from pygraph.ir.graph import Graph
from pygraph.ir.lexical import COST_FIELDS
from pygraph.ir.node import KernelNode, Value, graph_refs_in, values_in
from pygraph.ir.types import Dim, OpaqueType, ScalarType, TensorType, Type

__all__ = [
    "Rule",
    "Violation",
    "effects",
    "expressions",
    "links",
    "names",
    "order",
    "outputs",
    "subgraphs",
    "types",
]

Violation: TypeAlias = tuple[KernelNode | None, str]
Rule: TypeAlias = Callable[[Graph], Iterator[Violation]]


def names(graph: Graph) -> Iterator[Violation]:
    """Every input and node has a name of its own, by which the graph finds it."""
    seen: set[str] = set()
    owners: list[KernelNode | Value] = [*graph.inputs, *graph.nodes]
    for owner in owners:
        node = owner if isinstance(owner, KernelNode) else None
        if owner.name in seen:
            yield node, f"the name '{owner.name}' is used twice"
        seen.add(owner.name)
        if graph.owner(owner.name) is not owner:
            yield node, f"the graph does not know '{owner.name}' under its name"


def links(graph: Graph) -> Iterator[Violation]:
    """Operands belong to the graph; results know their producer; users are exactly who uses a value, and how often."""
    users: dict[Value, Counter[KernelNode]] = {value: Counter() for value in graph.values()}
    for node in graph.nodes:
        yield from _node_links(node, users)
    for value, counted in users.items():
        if dict(counted) != value.users:
            yield value.producer, f"the users recorded for {value!r} are not those that use it"


def _node_links(node: KernelNode, users: dict[Value, Counter[KernelNode]]) -> Iterator[Violation]:
    operands = tuple(values_in((*node.args, *node.attrs.values())))
    if operands != node.inputs:
        yield node, "its flattened operands are not those of its arguments and attributes"
    for index, value in enumerate(node.outputs):
        if value.producer is not node or value.index != index:
            yield node, f"result {index} does not say that this node produces it"
    for value in operands:
        if value not in users:
            yield node, f"operand {value!r} belongs to no node or input of this graph"
        else:
            users[value][node] += 1


def outputs(graph: Graph) -> Iterator[Violation]:
    """What is returned belongs to the graph."""
    known = set(graph.values())
    for value in graph.output_values:
        if value not in known:
            yield None, f"returned value {value!r} belongs to no node or input of this graph"


def order(graph: Graph) -> Iterator[Violation]:
    """Program order is topological: producers, and nodes named by ``after``, come first."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        needed = [value.producer for value in node.inputs if value.producer is not None]
        for before in (*needed, *node.after):
            if before not in place:
                yield node, f"it must run after {before.name}, which is not in this graph"
            elif place[before] >= place[node]:
                yield node, f"it needs {before.name}, which comes later"


def effects(graph: Graph) -> Iterator[Violation]:
    """Effects name operands and results that exist; written operands have memory."""
    for node in graph.nodes:
        stated = node.effects
        operands, results = range(len(node.inputs)), range(len(node.outputs))
        positions = [*stated.writes, *(stated.reads or ()), *(operand for _, operand in stated.aliases)]
        for position in positions:
            if position not in operands:
                yield node, f"its effects name operand {position}, but it has {len(operands)}"
        for result, _ in stated.aliases:
            if result not in results:
                yield node, f"its effects name result {result}, but it has {len(results)}"
        for position in stated.writes:
            if position in operands and isinstance(node.inputs[position].type, ScalarType):
                yield node, f"it writes operand {position}, a number, which has no memory"


def types(graph: Graph) -> Iterator[Violation]:
    """Sizes are no negative numbers, strides one per size, scalars int, float or bool, names not empty."""
    for value in graph.values():
        reason = _type_fault(value.type)
        if reason:
            yield value.producer, f"{value!r}: {reason}"


def _type_fault(type: Type) -> str | None:
    if isinstance(type, TensorType):
        return _tensor_fault(type)
    if isinstance(type, ScalarType) and type.kind not in ("int", "float", "bool"):
        return f"'{type.kind}' is no kind of number"
    if isinstance(type, OpaqueType) and not type.name:
        return "an opaque type needs a name"
    return None


def _tensor_fault(type: TensorType) -> str | None:
    if type.stride is not None and len(type.stride) != len(type.shape):
        return f"{len(type.shape)} sizes but {len(type.stride)} strides"
    negative = [size for size in (*type.shape, *type.strides) if _is_negative(size)]
    return f"size or stride {negative[0]} is negative" if negative else None


def _is_negative(size: Dim) -> bool:
    return isinstance(size, int) and size < 0


def expressions(graph: Graph) -> Iterator[Violation]:
    """Sizes and costs are in the IR's own terms, so that they print, parse and compare."""
    for value in graph.values():
        for size in _dims_of(value.type):
            if not _is_canonical(size):
                yield value.producer, f"{value!r}: size {size} uses terms that the IR does not have"
    for node in graph.nodes:
        for field in COST_FIELDS:
            cost = getattr(node.cost, field)
            if cost is not None and not _is_canonical(cost):
                yield node, f"its cost {field} = {cost} uses terms that the IR does not have"


def _dims_of(type: Type) -> tuple[Dim, ...]:
    if isinstance(type, TensorType):
        return (*type.shape, *(type.stride or ()))
    return (type.expr,) if isinstance(type, ScalarType) and type.expr is not None else ()


def _is_canonical(value: Dim) -> bool:
    if isinstance(value, (int, float)):
        return True
    return isinstance(value, sympy.Expr) and _is_canonical_expression(value)


@lru_cache(maxsize=16384)
def _is_canonical_expression(value: sympy.Expr) -> bool:
    return bool(canonical(value) == value)


def subgraphs(graph: Graph) -> Iterator[Violation]:
    """Operands and attributes refer to subgraphs that exist."""
    for node in graph.nodes:
        for reference in graph_refs_in((*node.args, *node.attrs.values())):
            if reference.name not in graph.subgraphs:
                yield node, f"there is no subgraph @{reference.name}"
