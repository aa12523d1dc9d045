"""Order and meaning agree: what the dependences leave open changes nothing, what they demand would be seen.

The dependences are also held against an all-pairs definition of conflict, and against a linear bound.
"""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from pygraph.ir import Effects, Graph, KernelNode, Value, dependences, parse_graph, verify
from pygraph.ir.interp import interpret
from pygraph.ir.order import memory_roots
from pygraph.testing.strategies import operator_graphs

graphs = operator_graphs()


def conflicts(one: KernelNode, other: KernelNode, roots: dict[Value, Value]) -> bool:
    """The definition: whether ``other``, later in program order, must stay after ``one``."""
    a, b = one.effects, other.effects
    if one in {value.producer for value in other.inputs} or one in other.after or a.barrier or b.barrier:
        return True
    if (a.rng is not None and a.rng == b.rng) or (a.collective is not None and a.collective == b.collective):
        return True
    pairs = [(i, j) for i, first in uses(one) for j, then in uses(other) if first or then]
    return any(roots[one.inputs[i]] is roots[other.inputs[j]] for i, j in pairs)


def uses(node: KernelNode) -> list[tuple[int, bool]]:
    """Operands whose memory ``node`` touches, and whether it writes there."""
    reads = range(len(node.inputs)) if node.effects.reads is None else node.effects.reads
    return [*((i, False) for i in reads), *((i, True) for i in node.effects.writes)]


def observe(graph: Graph) -> tuple[object, dict[str, str]]:
    """The outcome with every value returned, and what each node did."""
    graph = graph.clone()
    graph.set_outputs(sorted(graph.values(), key=lambda value: value.name))
    trace: dict[str, str] = {}
    return interpret(graph, trace=trace), trace


@settings(max_examples=100)
@given(operator_graphs(max_nodes=20))
def test_dependences_are_the_closure_of_conflicts_and_linear_in_number(graph: Graph) -> None:
    note(str(graph))
    verify(graph)
    roots = memory_roots(graph)
    nodes = graph.nodes
    edges = dependences(graph)
    pairs = [(a, b) for j, b in enumerate(nodes) for a in nodes[:j] if conflicts(a, b, roots)]
    found, wanted = (nx.transitive_closure_dag(nx.DiGraph(order)) for order in (edges, pairs))
    assert set(found.edges) == set(wanted.edges)
    operands = sum(len(node.inputs) + len(node.effects.writes) + len(node.after) for node in nodes)
    assert len(edges) <= 3 * operands + 4 * len(graph)
    assert len(edges) == len(set(edges))


@settings(max_examples=80)
@given(graphs, st.data())
def test_any_topological_order_means_the_same(graph: Graph, data: st.DataObject) -> None:
    note(str(graph))
    edges = dependences(graph)
    waiting = {node.name: {a.name for a, b in edges if b is node} for node in graph.nodes}
    order: list[str] = []
    while waiting:
        ready = [name for name, needed in waiting.items() if needed <= set(order)]
        order.append(data.draw(st.sampled_from(ready)))
        del waiting[order[-1]]
    shuffled = graph.clone()
    shuffled.reorder(shuffled.node(name) for name in order)
    verify(shuffled)
    assert observe(shuffled) == observe(graph)
    assert interpret(shuffled) == interpret(graph)


def repeated(node: KernelNode, events: dict[str, str]) -> bool:
    """True if another node has the same event, so that moving this one may mean nothing: a copy made again, say."""
    return list(events.values()).count(events[node.name]) > 1


@settings(max_examples=100)
@given(graphs, st.data())
def test_swapping_conflicting_neighbours_is_seen(graph: Graph, data: st.DataObject) -> None:
    note(str(graph))
    edges = set(dependences(graph))
    held = [(a, b) for a, b in pairwise(graph.nodes) if (a, b) in edges]
    pairs = [(a, b) for a, b in held if a not in b.after and all(value.producer is not a for value in b.inputs)]
    assume(pairs)
    first, then = data.draw(st.sampled_from(pairs))
    prefix = graph.clone()
    prefix.set_outputs([])
    prefix.erase(*prefix.nodes[graph.nodes.index(then) + 1 :])
    before = observe(prefix)
    assume(not repeated(first, before[1]) and not repeated(then, before[1]))
    *rest, a, b = prefix.nodes
    prefix.reorder([*rest, b, a])
    assert observe(prefix) != before


def test_values_that_share_memory_have_one_root() -> None:
    graph = parse_graph("""graph @g (%x : f32[4]@cpu, %y : f32[4]@cpu) {
      %a:2 = f(%x) : (f32[4]@cpu, f32[4]@cpu) !aliases[0:0]
      %b = f(%y, %a.0) : f32[4]@cpu !aliases[0:0, 0:1]
      return ()
    }""")
    roots = {value.name: root.name for value, root in memory_roots(graph).items()}
    assert roots == {"x": "x", "y": "x", "a.0": "x", "a.1": "a.1", "b": "x"}
    assert graph.nodes[0].effects == Effects(aliases=((0, 0),))
