"""The networkx views: nodes in program order, the right edges, regions contracted."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings

from pygraph.analysis import dependence_graph, dependence_lists, quotient_graph
from pygraph.ir import REGION, Graph
from tests.passes.build import build
from tests.strategies import operator_graphs


def sample() -> Graph:
    return build("a: launch x", "m: write x", "b: launch a", "u: host m", "c: launch u b")


def test_dependences_include_effects() -> None:
    made = dependence_graph(sample())
    assert [node.name for node in made] == ["a", "m", "b", "u", "c"]
    edges = {(first.name, then.name) for first, then in made.edges}
    assert edges == {("a", "m"), ("a", "b"), ("m", "u"), ("u", "c"), ("b", "c")}


def test_dependence_graph_is_kept_until_a_mutation() -> None:
    graph = sample()
    made = dependence_graph(graph)
    assert dependence_graph(graph) is made
    graph.add_order(graph.node("m"), graph.node("b"))
    assert dependence_graph(graph) is not made
    assert dependence_graph(graph).has_edge(graph.node("m"), graph.node("b"))


def test_lists_say_the_same_by_position() -> None:
    lists = dependence_lists(sample())
    assert [sorted(before) for before in lists.before] == [[], [0], [0], [1], [2, 3]]
    assert [sorted(after) for after in lists.after] == [[1, 2], [3], [4], [4], []]


def test_regions_become_one_node_each() -> None:
    graph = sample()
    for name, region in (("a", 0), ("b", 0), ("c", 1)):
        graph.node(name).meta.set(REGION, region)
    made = quotient_graph(graph)
    assert list(made) == [0, graph.node("m"), graph.node("u"), 1]
    assert set(made.edges) == {(0, graph.node("m")), (graph.node("m"), graph.node("u")), (graph.node("u"), 1), (0, 1)}


def test_a_region_around_a_host_node_is_a_cycle() -> None:
    graph = build("a: launch x", "u: host a", "b: launch u")
    for name in "ab":
        graph.node(name).meta.set(REGION, 0)
    assert not nx.is_directed_acyclic_graph(quotient_graph(graph))


@settings(deadline=None, max_examples=100)
@given(operator_graphs())
def test_program_order_is_an_order_of_the_dependence_graph(graph: Graph) -> None:
    place = {node: i for i, node in enumerate(graph.nodes)}
    made = dependence_graph(graph)
    assert list(made) == list(graph.nodes)
    assert all(place[first] < place[then] for first, then in made.edges)
