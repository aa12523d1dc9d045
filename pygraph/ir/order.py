"""The order that a graph's meaning demands: one linear pass that turns data, memory and other effects into edges.

This is the only place that says what must run before what: the verifier and the passes ask it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pygraph.ir.effects import NAMED
from pygraph.ir.graph import Graph
from pygraph.ir.node import KernelNode, Value

__all__ = ["Edge", "dependences", "memory_roots"]

Edge = tuple[KernelNode, KernelNode]


def memory_roots(graph: Graph) -> dict[Value, Value]:
    """For each value, the first value (in program order) of those that share its memory.

    Sharing is the closure of the nodes' ``aliases``. Inputs of a graph are taken to be disjoint from each other.
    """
    parent: dict[Value, Value] = {value: value for value in graph.values()}
    for node in graph.nodes:
        for output, operand in node.effects.aliases:
            one, other = _find(parent, node.inputs[operand]), _find(parent, node.outputs[output])
            parent[other] = one
    first: dict[Value, Value] = {}
    roots: dict[Value, Value] = {}
    for value in parent:
        roots[value] = first.setdefault(_find(parent, value), value)
    return roots


def dependences(graph: Graph) -> list[Edge]:
    """Pairs ``(before, node)``, without repetitions, whose transitive closure is the order that must be kept.

    - data: the producer of each operand;
    - ``after``: explicit edges;
    - memory: a write through any alias comes after every earlier read and write of the same memory, and before every
      later one;
    - ``rng``, ``collective``: draws of one generator, and calls in one process group, stay in order;
    - ``barrier``: comes after everything before it and before everything after it.

    ``sync`` alone orders nothing: what the host reads is ordered by data and memory. What a graph returns is read after
    its last node, so returning written memory orders no two nodes. The edges are chains, not all pairs: their number
    is linear in nodes and operands. Nodes are taken in program order,
    which decides between two conflicting ones. Effects must name existing operands (the verifier's rule ``effects``).
    """
    tracker = _Tracker(graph)
    edges: list[Edge] = []
    for node in graph.nodes:
        # only this node's visit yields edges into it, so repetitions are found among few
        edges += [(before, node) for before in dict.fromkeys(tracker.visit(node)) if before is not node]
    return edges


def _find(parent: dict[Value, Value], value: Value) -> Value:
    while parent[value] is not value:
        parent[value] = value = parent[parent[value]]
    return value


@dataclass(slots=True)
class _Memory:
    """Who last wrote the memory of one root, and who has read it since."""

    writer: KernelNode | None = None
    readers: list[KernelNode] = field(default_factory=list)


class _Tracker:
    """Walks nodes in program order and yields, for each, the earlier nodes that it must follow."""

    def __init__(self, graph: Graph) -> None:
        self.roots = memory_roots(graph)
        # reads of memory that nobody writes order nothing: most graphs write little
        self.written = {self.roots[n.inputs[position]] for n in graph.nodes for position in n.effects.writes}
        self.memory: dict[Value, _Memory] = {}
        self.chains: dict[tuple[str, str], KernelNode] = {}
        self.barrier: KernelNode | None = None
        self.since_barrier: list[KernelNode] = []

    def visit(self, node: KernelNode) -> Iterator[KernelNode]:
        for value in node.inputs:
            if value.producer is not None:
                yield value.producer
        yield from node.after
        yield from self._accesses(node)
        yield from self._links(node)
        yield from self._barriers(node)

    def _accesses(self, node: KernelNode) -> Iterator[KernelNode]:
        if not self.written:
            return
        effects = node.effects
        written = dict.fromkeys(effects.writes)
        reads = range(len(node.inputs)) if effects.reads is None else effects.reads
        for position in reads:
            yield from self._access(node, position, write=False)
        for position in written:
            yield from self._access(node, position, write=True)

    def _access(self, node: KernelNode, position: int, *, write: bool) -> Iterator[KernelNode]:
        root = self.roots[node.inputs[position]]
        if root not in self.written:
            return
        memory = self.memory.setdefault(root, _Memory())
        if memory.writer is not None:
            yield memory.writer
        if write:
            yield from memory.readers
            self.memory[root] = _Memory(node)
        elif not memory.readers or memory.readers[-1] is not node:
            memory.readers.append(node)

    def _links(self, node: KernelNode) -> Iterator[KernelNode]:
        for kind in NAMED:
            name = getattr(node.effects, kind)
            if name is None:
                continue
            if (kind, name) in self.chains:
                yield self.chains[kind, name]
            self.chains[kind, name] = node

    def _barriers(self, node: KernelNode) -> Iterator[KernelNode]:
        if self.barrier is not None:
            yield self.barrier
        if not node.effects.barrier:
            self.since_barrier.append(node)
            return
        yield from self.since_barrier
        self.barrier = node
        self.since_barrier = []
