"""Lifetimes and peak memory, views and returned values included."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings

from pygraph.analysis import last_uses, peak_bytes
from pygraph.ir import Graph, memory_roots, symbol
from tests.passes.build import TENSOR, build
from tests.strategies import operator_graphs

SIZE = 1024


def lasts(graph: Graph) -> dict[str, int]:
    return {value.name: position for value, position in last_uses(graph).items()}


def test_a_value_dies_at_its_last_use() -> None:
    graph = build("a: launch x", "b: launch a", "c: launch b", "d: launch c", returns="d")
    assert lasts(graph) == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert peak_bytes(graph) == 2 * SIZE


def test_a_view_keeps_its_memory_alive() -> None:
    graph = build("a: launch x", "v: view a", "b: launch x", "c: launch v b", returns="c")
    assert lasts(graph) == {"a": 3, "b": 3, "c": 4}
    assert peak_bytes(graph) == 3 * SIZE


def test_returned_memory_lives_to_the_end() -> None:
    graph = build("a: launch x", "v: view a", "b: launch x", "c: launch x", returns="v")
    assert lasts(graph)["a"] == 4
    assert peak_bytes(graph) == 2 * SIZE


def test_inputs_and_views_of_them_take_nothing() -> None:
    graph = build("v: view x", "m: write v", returns="m")
    assert lasts(graph) == {}
    assert peak_bytes(graph) == 0


def test_order_matters() -> None:
    graph = build("a: launch x", "b: launch x", "n: size a", "k: size b", returns="n k")
    assert peak_bytes(graph) == 2 * SIZE
    a, b, n, k = graph.nodes
    graph.reorder([a, n, b, k])
    assert peak_bytes(graph) == SIZE


def test_symbols_are_valued() -> None:
    graph = build("a: launch x", returns="a")
    graph.set_type(graph.value("a"), dataclasses.replace(TENSOR, shape=(symbol("s0"), 2)))
    assert peak_bytes(graph) is None
    assert peak_bytes(graph, {"s0": 8}) == 64
    graph.hints["s0"] = 4
    assert peak_bytes(graph) == 32


def test_numbers_take_no_memory() -> None:
    assert peak_bytes(build("n: size s0", "a: launch x n")) == SIZE


@settings(deadline=None, max_examples=100)
@given(operator_graphs())
def test_peak_is_what_a_simulation_finds(graph: Graph) -> None:
    place = {node: i for i, node in enumerate(graph.nodes)}
    roots = memory_roots(graph)
    used = {(roots[value], place[node]) for node in graph.nodes for value in (*node.inputs, *node.outputs)}
    used |= {(roots[value], len(graph)) for value in graph.output_values}
    tensor = graph.inputs[0].type
    made = [value for value in graph.values() if value.producer and roots[value] is value and value.type == tensor]
    born = {value: place[value.producer] for value in made if value.producer}
    dies = {value: max(at for root, at in used if root is value) for value in made}
    alive = [sum(born[v] <= at <= dies[v] for v in made) for at in range(len(graph))]
    assert peak_bytes(graph) == max(alive, default=0) * 8 * 4 * 4  # f32[s0, 4] with the hint s0 = 8
