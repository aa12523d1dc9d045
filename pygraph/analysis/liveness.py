"""How long values live in program order, and how much memory that takes at most.

Memory is counted by root: values that share memory live as long as the last of them. How memory is really laid out is
Inductor's and the runtime's business.
"""

from __future__ import annotations

from collections.abc import Mapping

from pygraph.ir import BufferType, Graph, TensorType, Value
from pygraph.ir.cost import evaluate
from pygraph.ir.order import memory_roots

__all__ = ["last_uses", "peak_bytes"]


def last_uses(graph: Graph) -> dict[Value, int]:
    """For each memory root that a node makes, the position of the last node that uses it through any alias.

    A root that is returned, through any alias, lives to the end: its position is ``len(graph)``.
    """
    return graph.cached(_last_uses)


def _last_uses(graph: Graph) -> dict[Value, int]:
    roots = memory_roots(graph)
    last: dict[Value, int] = {}
    for position, node in enumerate(graph.nodes):
        for value in (*node.inputs, *node.outputs):
            if roots[value].producer is not None:
                last[roots[value]] = position
    for value in graph.output_values:
        if roots[value].producer is not None:
            last[roots[value]] = len(graph)
    return last


def peak_bytes(graph: Graph, values: Mapping[str, int] | None = None) -> int | None:
    """The most bytes that the nodes' results take at one time in program order, inputs not counted.

    Symbols are replaced by ``values`` (the graph's hints by default). None when a size stays unknown.
    """
    known = graph.hints if values is None else values
    ending: dict[int, int] = {}
    live = peak = 0
    last = last_uses(graph)
    for position, node in enumerate(graph.nodes):
        for value in node.outputs:
            size = _nbytes(value, known) if value in last else 0
            if size is None:
                return None
            live += size
            ending[last.get(value, position)] = ending.get(last.get(value, position), 0) + size
        peak = max(peak, live)
        live -= ending.pop(position, 0)
    return peak


def _nbytes(value: Value, known: Mapping[str, int]) -> int | None:
    if not isinstance(value.type, TensorType | BufferType):
        return 0
    size = evaluate(value.type.nbytes, known)
    return None if size is None else int(size)
