"""The order that the meaning of a graph requires: one linear pass turns data, memory and other effects into edges.

No other place decides which nodes must run before which: the verifier and the passes use this one.
"""

from __future__ import annotations

from pygraph.ir.effects import NAMED
from pygraph.ir.graph import Graph
from pygraph.ir.node import KernelNode, Value
from pygraph.waits import WHOLE, Waits


def memory_roots(graph: Graph) -> dict[Value, Value]:
    """For each value, the first value (in program order) that shares its memory.

    Sharing is the closure of the nodes' ``aliases``. Inputs of a graph are assumed to be disjoint.
    """
    from networkx.utils import UnionFind  # takes a while; Inductor imports it, too

    shared: UnionFind[Value] = UnionFind(graph.values())
    for node in graph.nodes:
        for output, operand in node.effects.aliases:
            shared.union(node.inputs[operand], node.outputs[output])
    first: dict[Value, Value] = {}
    return {value: first.setdefault(shared[value], value) for value in graph.values()}


def dependences(graph: Graph) -> list[tuple[KernelNode, KernelNode]]:
    """Pairs ``(before, node)``, without repetitions, whose transitive closure is the order that must be kept.

    - data: the producer of each operand
    - ``after``: explicit edges
    - memory: a write through any alias follows every earlier read and write of the same memory, and precedes every
      later one
    - ``rng``, ``collective``: draws of one generator, and calls in one process group, stay in order
    - ``barrier``: it follows all nodes before it, and precedes all nodes after it

    ``sync`` alone adds no edge: data and memory order the values that the host reads. Outputs are read after the last
    node, so a returned value adds no edge either. Edges form chains: their number is linear in nodes and operands. Two
    nodes that conflict stay in program order. Effects must name existing operands (the verifier's rule ``effects``).
    """
    roots = memory_roots(graph)
    # reads of memory that no node writes add no order: most graphs write little
    written = {roots[node.inputs[position]] for node in graph.nodes for position in node.effects.writes}
    waits: Waits[Value] = Waits()
    edges: list[tuple[KernelNode, KernelNode]] = []
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        effects = node.effects
        before = {value.producer: None for value in node.inputs if value.producer is not None}
        before.update(node.after)
        reads = (roots[node.inputs[at]] for at in (range(len(node.inputs)) if effects.reads is None else effects.reads))
        used = [(root, WHOLE, False) for root in reads if root in written]
        used += [(roots[node.inputs[at]], WHOLE, True) for at in effects.writes]
        chains = [(kind, name) for kind in NAMED if (name := getattr(effects, kind)) is not None]
        earlier = waits.add(place, None if effects.barrier else used, chains)
        before.update(dict.fromkeys(nodes[at] for at in sorted(earlier)))
        edges += [(first, node) for first in before]
    return edges
