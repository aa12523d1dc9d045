"""Child graphs of a captured graph, replaced by their nodes: what a region launches as a graph becomes launches.

What a node can be is the subject of ``nodes``, what orders nodes that of ``edges``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import networkx as nx

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.bindings import call
from pygraph.runtime.cuda.edges import Edge, depend, read_edges
from pygraph.runtime.cuda.nodes import handles, kind_name, kinds_of

__all__ = ["Inlined", "inline"]

_ORDINARY = bytes(8)
"""Data of an edge whose later node waits until the earlier one has completed."""


@dataclass(frozen=True)
class Inlined:
    """The nodes of a graph without child graphs, in the order of capture, and the kind of each.

    ``starts`` maps numbers of captured nodes, of which a child graph is one, to those of ``handles``: entry i is how
    many of these come before captured node i; the last one is for what comes behind all of them. It is empty where
    there was no child graph, so that the numbers are the same. ``kept`` holds what the nodes of child graphs need.
    """

    handles: list[Any]
    kinds: list[Any]
    starts: tuple[int, ...] = ()
    kept: tuple[object, ...] = ()


def inline(driver: ModuleType, graph: int) -> Inlined:
    """Replace every child graph of ``graph``, and theirs in turn, by copies of its nodes.

    Child graphs of ``graph`` itself come one after the other then, as captured: uncaptured, an executable graph never
    overlaps itself, which two launches of one on two branches have lost. Raises CaptureError: ``unsupported-node`` for
    a child graph with a node that cannot be copied, by name; ``unordered-nodes`` as ``edges.ordered`` does.
    """
    found = handles(driver, graph)
    kinds = kinds_of(driver, found)
    child = int(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH)
    if all(int(kind) != child for kind in kinds):
        return Inlined(found, kinds)
    return _Inlining(driver, graph, child).run(found, kinds)


# -- graphs without child graphs ----------------------------------------------------------------------------------


@dataclass
class _Flat:
    """Nodes (handle and kind) in an order that the edges allow, by the numbers of their handles."""

    nodes: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    edges: dict[Edge, None] = field(default_factory=dict)

    def roots(self) -> list[int]:
        """The nodes that depend on no other."""
        later = {edge.later for edge in self.edges}
        return [node for node in self.nodes if node not in later]

    def sinks(self) -> list[int]:
        """The nodes that no other depends on."""
        earlier = {edge.earlier for edge in self.edges}
        return [node for node in self.nodes if node not in earlier]


def _substituted(nodes: Mapping[int, tuple[Any, Any]], edges: Iterable[Edge], children: Mapping[int, _Flat]) -> _Flat:
    """A graph with each node of ``children`` replaced by that graph.

    Its roots wait for what the node waited for, and what waited for the node waits for its sinks, or, where it is
    empty, for what it waited for. All of them wait for completion, whatever the edge to or from the node said.
    """
    before: defaultdict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        before[edge.later].append(edge)
    made, ends = _Flat(), dict[int, list[int]]()
    for place, (node, facts) in enumerate(nodes.items()):
        child = children.get(node)
        waits: dict[tuple[int, bytes], None] = {}
        for edge in before[node]:
            if edge.earlier not in ends:
                raise CaptureError("unordered-nodes", f"node {place} comes before one that it depends on")
            kept = child is None and edge.earlier not in children
            waits.update(((end, edge.data if kept else _ORDINARY), None) for end in ends[edge.earlier])
        own = _Flat({node: facts}) if child is None else child
        made.nodes.update(own.nodes)
        made.edges.update(own.edges)
        made.edges.update((Edge(end, root, data), None) for root in own.roots() for end, data in waits)
        ends[node] = own.sinks() if own.nodes else list(dict.fromkeys(end for end, _ in waits))
    return made


def _in_turn(nodes: Iterable[int], edges: Iterable[Edge], children: Mapping[int, _Flat]) -> list[Edge]:
    """Edges to add, so that each child graph comes before the next: from one to the next, where no path leads there."""
    before: defaultdict[int, list[int]] = defaultdict(list)
    for edge in edges:
        before[edge.later].append(edge.earlier)
    last: dict[int, int] = {}  # how many of the child graphs, which are in turn, come before or at a node
    added, turn = list[Edge](), list[int]()
    for node in nodes:
        last[node] = max((last.get(earlier, 0) for earlier in before[node]), default=0)
        if node not in children:
            continue
        if last[node] < len(turn):
            added.append(Edge(turn[-1], node, _ORDINARY))
        turn.append(node)
        last[node] = len(turn)
    return added


def _sorted(nodes: Sequence[int], edges: Iterable[Edge]) -> list[int]:
    """``nodes`` as listed, or, where edges do not allow that, each behind those that it depends on."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    place = {node: index for index, node in enumerate(nodes)}
    graph.add_nodes_from(nodes)
    graph.add_edges_from((edge.earlier, edge.later) for edge in edges)
    return list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))


# -- in the driver ------------------------------------------------------------------------------------------------


class _Kept:
    """A clone of a child graph: what graphs own is owned by their clones too, and may be what their nodes need."""

    def __init__(self, driver: ModuleType, graph: Any) -> None:
        clone = call(driver.cuGraphClone, graph)
        weakref.finalize(self, driver.cuGraphDestroy, clone).atexit = False


class _Inlining:
    """Copies the nodes of child graphs into ``graph``."""

    def __init__(self, driver: ModuleType, graph: int, child: int) -> None:
        self._driver, self._graph, self._child = driver, graph, child
        kinds = driver.CUgraphNodeType
        self._copies = {
            int(kinds.CU_GRAPH_NODE_TYPE_KERNEL): self._kernel,
            int(kinds.CU_GRAPH_NODE_TYPE_MEMCPY): self._copy,
            int(kinds.CU_GRAPH_NODE_TYPE_MEMSET): self._fill,
            int(kinds.CU_GRAPH_NODE_TYPE_EMPTY): self._empty,
        }

    def run(self, found: Sequence[Any], kinds: Sequence[Any]) -> Inlined:
        """``found`` are the graph's nodes in order of capture, ``kinds`` what they are."""
        nodes, children = _numbered(found, kinds), dict[int, _Flat]()
        for index, (node, (handle, kind)) in enumerate(nodes.items()):
            if int(kind) == self._child:
                children[node] = self._flat(handle, index)
        edges = _known(read_edges(self._graph))
        flat = _substituted(nodes, [*edges, *_in_turn(nodes, edges, children)], children)
        kept = tuple(_Kept(self._driver, self._graph_of(nodes[node][0])) for node in children)
        made = {node: handle for node, (handle, _) in nodes.items()}
        for node, (handle, kind) in flat.nodes.items():
            if node not in nodes:
                made[node] = self._copies[int(kind)](self._driver.CUgraph(self._graph), handle)
        known = set(edges)
        for edge in flat.edges:
            if edge not in known:
                depend(self._driver, self._graph, made[edge.earlier], made[edge.later])
        for node in children:
            call(self._driver.cuGraphDestroyNode, nodes[node][0])
        left = [made[node] for node in flat.nodes]
        return Inlined(left, [kind for _, kind in flat.nodes.values()], _starts(nodes, children), kept)

    def _flat(self, handle: Any, index: int) -> _Flat:
        """The graph of the child graph ``handle``, which is part of captured node ``index``."""
        graph = int(self._graph_of(handle))
        found = handles(self._driver, graph)
        nodes, children = _numbered(found, kinds_of(self._driver, found)), dict[int, _Flat]()
        for node, (inner, kind) in nodes.items():
            if int(kind) == self._child:
                children[node] = self._flat(inner, index)
            elif int(kind) not in self._copies:
                said = f"launch {index} is a child graph with a node of kind {kind_name(kind)}"
                raise CaptureError("unsupported-node", said, launch=index)
        # Kernels that start early are relied upon to wait before they touch memory, since allocators reuse memory from
        # one launch of a stream to the next. What a graph uses is alive all along it: no program relies on that here.
        edges = {Edge(edge.earlier, edge.later, _ORDINARY): None for edge in _known(read_edges(graph))}
        return _substituted({node: nodes[node] for node in _sorted(list(nodes), edges)}, edges, children)

    def _graph_of(self, handle: Any) -> Any:
        return call(self._driver.cuGraphChildGraphNodeGetGraph, handle)

    # -- copies of nodes, which depend on nothing yet; parameters belong to the node that they were asked of ----------

    def _kernel(self, graph: Any, handle: Any) -> Any:
        params = call(self._driver.cuGraphKernelNodeGetParams, handle)
        made = call(self._driver.cuGraphAddKernelNode, graph, [], 0, params)
        call(self._driver.cuGraphKernelNodeCopyAttributes, made, handle)  # clusters, priorities
        return made

    def _copy(self, graph: Any, handle: Any) -> Any:
        params = call(self._driver.cuGraphMemcpyNodeGetParams, handle)
        return call(self._driver.cuGraphAddMemcpyNode, graph, [], 0, params, call(self._driver.cuCtxGetCurrent))

    def _fill(self, graph: Any, handle: Any) -> Any:
        params = call(self._driver.cuGraphMemsetNodeGetParams, handle)
        return call(self._driver.cuGraphAddMemsetNode, graph, [], 0, params, call(self._driver.cuCtxGetCurrent))

    def _empty(self, graph: Any, handle: Any) -> Any:  # noqa: ARG002
        return call(self._driver.cuGraphAddEmptyNode, graph, [], 0)


def _known(edges: list[Edge] | None) -> list[Edge]:
    if edges is None:
        raise CaptureError("unsupported-node", "a child graph, where this CUDA driver does not tell edges")
    return edges


def _numbered(found: Sequence[Any], kinds: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    return {int(handle): (handle, kind) for handle, kind in zip(found, kinds, strict=True)}


def _starts(nodes: Iterable[int], children: Mapping[int, _Flat]) -> tuple[int, ...]:
    """As ``Inlined.starts``."""
    starts = [0]
    for node in nodes:
        starts.append(starts[-1] + (len(children[node].nodes) if node in children else 1))
    return tuple(starts)
