"""The critical path by modelled time, against networkx on random graphs."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings

from pygraph.analysis import critical_path, dependence_graph
from pygraph.ir import H200, HOST, Graph
from tests.passes.build import build
from tests.strategies import operator_graphs


def test_the_longest_chain_by_time() -> None:
    graph = build("a: launch x", "h: heavy x", "b: launch a", "c: launch b", "d: launch h", returns="c d")
    found = critical_path(graph, H200)
    heavy, light = (H200.time_us(graph.node(name).cost, {}) or 0.0 for name in "ha")
    assert [node.name for node in found.nodes] == ["a", "b", "c"]
    assert found.time_us == pytest.approx(3 * light)
    assert found.serial_us == pytest.approx(4 * light + heavy)
    assert found.unknown == 0
    slow = critical_path(graph, HOST)
    assert [node.name for node in slow.nodes] == ["h", "d"]


def test_effects_make_chains_too() -> None:
    graph = build("a: launch x", "m: write x", "b: launch x")
    assert [node.name for node in critical_path(graph, H200).nodes] == ["a", "m", "b"]


def test_unknown_times_are_counted() -> None:
    graph = build("a: unknown x", "b: launch a")
    found = critical_path(graph, H200)
    assert (found.unknown, found.time_us) == (1, H200.time_us(graph.node("b").cost, {}))


def test_an_empty_graph() -> None:
    found = critical_path(Graph(), H200)
    assert (found.nodes, found.time_us, found.serial_us) == ((), 0.0, 0.0)


@settings(deadline=None, max_examples=100)
@given(operator_graphs())
def test_no_chain_takes_longer(graph: Graph) -> None:
    found = critical_path(graph, HOST)
    times = {node: HOST.time_us(node.cost, graph.hints) or 0.0 for node in graph.nodes}
    weighted: nx.DiGraph = nx.DiGraph()
    weighted.add_nodes_from(["start", *graph.nodes])
    for node in graph.nodes:
        for before in [*dependence_graph(graph).predecessors(node), "start"]:
            weighted.add_edge(before, node, weight=times[node])
    assert found.time_us == pytest.approx(nx.dag_longest_path_length(weighted))
    assert found.time_us == pytest.approx(sum(times[node] for node in found.nodes))
    assert all(dependence_graph(graph).has_edge(a, b) for a, b in zip(found.nodes, found.nodes[1:], strict=False))
