"""The order that a graph's meaning demands: one linear pass that turns data, memory and other effects into edges.

This is the only place that says what must run before what: the verifier uses it, and ``pygraph.analysis`` builds its
networkx views from it. It knows nothing of regions or schedules.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from pygraph.ir.graph import Graph
from pygraph.ir.node import KernelNode, Value

__all__ = ["Edge", "dependences", "memory_roots", "operand_range"]

Edge = tuple[KernelNode, KernelNode]

WHOLE = (0.0, math.inf)


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
      later one; where ``attrs["ranges"]`` gives a launch's byte ranges, only overlapping ranges count;
    - ``rng``, ``collective``: draws of one generator, and calls in one process group, stay in order;
    - ``barrier``: comes after everything before it and before everything after it.

    ``sync`` alone orders nothing: what the host reads is ordered by data and memory. What a graph returns is read after
    its last node, so returning written memory orders no two nodes. The edges are chains, not all pairs: their number
    is linear in nodes and operands (in overlapping pieces of ranges, for launches). Nodes are taken in program order,
    which decides between two conflicting ones. Effects must name existing operands (the verifier's rule ``effects``).
    """
    tracker = _Tracker(graph)
    edges: list[Edge] = []
    for node in graph.nodes:
        # only this node's visit yields edges into it, so repetitions are found among few
        edges += [(before, node) for before in dict.fromkeys(tracker.visit(node)) if before is not node]
    return edges


def operand_range(node: KernelNode, position: int) -> tuple[float, float]:
    """First byte and end of what ``node`` touches of an operand: all of it unless ``attrs["ranges"]`` says less."""
    ranges = node.attrs.get("ranges")
    if not isinstance(ranges, tuple) or position >= len(ranges):
        return WHOLE
    match ranges[position]:
        case (int(start), int(nbytes)):
            return (start, start + nbytes)
        case _:
            return WHOLE


def _find(parent: dict[Value, Value], value: Value) -> Value:
    while parent[value] is not value:
        parent[value] = value = parent[parent[value]]
    return value


@dataclass(slots=True)
class _Piece:
    """Who last wrote a piece of memory, and who has read it since."""

    writer: KernelNode | None = None
    readers: list[KernelNode] = field(default_factory=list)

    def split(self) -> _Piece:
        return _Piece(self.writer, list(self.readers))


class _Memory:
    """One root's bytes as adjacent pieces: piece ``i`` reaches from ``starts[i]`` to ``starts[i + 1]``."""

    __slots__ = ("pieces", "starts")

    def __init__(self) -> None:
        self.starts: list[float] = [-math.inf]
        self.pieces: list[_Piece] = [_Piece()]

    def _cut(self, at: float) -> int:
        """Make a piece start ``at`` and return its index."""
        index = bisect_left(self.starts, at)
        if index == len(self.starts) or self.starts[index] != at:
            self.starts.insert(index, at)
            self.pieces.insert(index, self.pieces[index - 1].split())
        return index

    def read(self, node: KernelNode, start: float, end: float) -> Iterator[KernelNode]:
        low = self._cut(start)
        for piece in self.pieces[low : self._end(end)]:
            if piece.writer is not None:
                yield piece.writer
            if not piece.readers or piece.readers[-1] is not node:
                piece.readers.append(node)

    def write(self, node: KernelNode, start: float, end: float) -> Iterator[KernelNode]:
        low = self._cut(start)
        high = self._end(end)
        for piece in self.pieces[low:high]:
            yield from piece.readers
            if piece.writer is not None:
                yield piece.writer
        self.starts[low:high] = [start]
        self.pieces[low:high] = [_Piece(node)]

    def _end(self, end: float) -> int:
        return len(self.starts) if end == math.inf else self._cut(end)


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
        start, end = operand_range(node, position)
        if root not in self.written or start >= end:
            return
        memory = self.memory.setdefault(root, _Memory())
        yield from memory.write(node, start, end) if write else memory.read(node, start, end)

    def _links(self, node: KernelNode) -> Iterator[KernelNode]:
        for kind, name in (("rng", node.effects.rng), ("collective", node.effects.collective)):
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
