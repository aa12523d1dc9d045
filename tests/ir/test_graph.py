"""The graph: names, links and order stay consistent through every mutation; equality sees everything that has text."""

from __future__ import annotations

import html
import math
import re

import pytest

from pygraph.ir import (
    REGION,
    Device,
    DType,
    Graph,
    GraphError,
    KernelNode,
    Meta,
    MetaKey,
    Parameter,
    Region,
    TensorType,
    parse_graph,
    verify,
)
from pygraph.ir.node import RESERVED

T = TensorType(DType.F32, (4,), Device("cpu"))


def chain(length: int = 3) -> tuple[Graph, list[KernelNode]]:
    graph = Graph()
    value = graph.add_input(T, "x")
    nodes = []
    for _ in range(length):
        nodes.append(graph.add("aten.relu.default", [value], [T]))
        value = nodes[-1].output
    graph.set_outputs([value])
    return graph, nodes


def test_names_are_unique_and_generated_around_taken_ones() -> None:
    graph = Graph()
    graph.add_input(T, "n0")
    assert graph.add("f").name == "n1"
    with pytest.raises(GraphError, match="taken"):
        graph.add("f", name="n0")


def test_a_renamed_node_takes_its_results_with_it() -> None:
    graph = Graph()
    two = graph.add("f", [], [T, T], name="a")
    graph.add("f", [two.outputs[1]], [T], name="b")
    with pytest.raises(GraphError, match="taken"):
        graph.rename(two, "b")
    graph.rename(two, "c")
    assert (graph.owner("a"), graph.value("c", 1)) == (None, two.outputs[1])
    assert parse_graph(str(graph)) == graph


def test_values_are_found_by_their_printed_name() -> None:
    graph = Graph()
    x = graph.add_input(T, "a.0")
    two = graph.add("f", [], [T, T], name="a")
    one = graph.add("f", [], [T], name="b.c")
    assert graph.value("a.0") is x
    assert graph.value("a", 1) is two.outputs[1]
    assert graph.value("b.c") is graph.value("b.c", 0) is one.output
    for name, index in (("a", None), ("a", 2), ("z", None), ("a.0", 1)):
        with pytest.raises(KeyError):
            graph.value(name, index)


def test_foreign_operands_and_orders_are_refused() -> None:
    graph, nodes = chain()
    other, others = chain()
    with pytest.raises(GraphError, match="does not belong"):
        graph.add("f", [others[0].output])
    with pytest.raises(GraphError, match="does not belong"):
        graph.add_order(others[0], nodes[1])
    with pytest.raises(GraphError, match="before itself"):
        graph.add_order(nodes[0], nodes[0])
    assert other == graph


def test_replacing_uses_and_erasing() -> None:
    graph, nodes = chain()
    region = graph.regions[0] = Region({nodes[1].output: Parameter("static", "")})
    graph.add_order(nodes[1], nodes[2])
    with pytest.raises(GraphError, match="still used by n2"):
        graph.erase(nodes[1])
    graph.replace_uses(nodes[1].output, nodes[0].output)
    graph.erase(nodes[1])
    assert nodes[2].inputs == (nodes[0].output,)
    assert not nodes[2].after
    assert not region.parameters
    verify(graph)
    with pytest.raises(GraphError, match="the outputs"):
        graph.erase(nodes[2])


def test_reorder_keeps_data_and_explicit_order() -> None:
    graph = Graph()
    a, b = graph.add("f", name="a"), graph.add("f", name="b")
    graph.reorder([b, a])
    assert [node.name for node in graph.nodes] == ["b", "a"]
    graph.add_order(b, a)
    with pytest.raises(GraphError, match="b, which it needs"):
        graph.reorder([a, b])
    with pytest.raises(GraphError, match="exactly once"):
        graph.reorder([a, a])


def test_clones_are_independent_even_while_operands_come_later() -> None:
    graph, nodes = chain()
    late = graph.add("late", [], [T])
    graph.set_args(nodes[0], [late.output])
    copy = graph.clone()
    assert copy == graph
    copy.node("n0").meta.set(REGION, 1)
    assert copy != graph
    assert parse_graph(str(graph)) == graph


def test_equality_tells_literals_apart() -> None:
    def graph_of(value: object, meta: object) -> Graph:
        graph = Graph()
        graph.add("f", [value]).meta = Meta({"k": meta})
        return graph

    assert graph_of(1, 1) != graph_of(True, 1)
    assert graph_of(1, 1) != graph_of(1, True)
    assert graph_of(0.0, 1) != graph_of(-0.0, 1)
    assert graph_of(math.nan, float("nan")) == graph_of(float("nan"), math.nan)


def test_annotations_are_typed_and_have_text() -> None:
    meta = Meta()
    with pytest.raises(TypeError, match="must be int"):
        meta.set(REGION, "0")
    with pytest.raises(TypeError, match="cannot be a dict"):
        MetaKey("table", dict)
    with pytest.raises(TypeError, match="cannot hold a list"):
        meta.set(MetaKey("pairs", tuple), (1, [2]))
    for name in RESERVED:
        with pytest.raises(ValueError, match="reserves"):
            MetaKey(name, str)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("f64", 8), ("bf16", 2), ("f8e4m3fn", 1), ("c64", 8), ("c128", 16), ("b8", 1), ("i16", 2), ("u64", 8)],
)
def test_itemsize(dtype: str, size: int) -> None:
    assert DType(dtype).itemsize == size


def test_mistakes_are_refused() -> None:
    graph = Graph("main")
    with pytest.raises(GraphError, match="type of an input comes first"):
        graph.add_input("x", T)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="zz"):
        graph.node("zz")
    with pytest.raises(TypeError, match="MetaKey"):
        graph.add("op").meta.set("foo", 1)  # type: ignore[arg-type]


SHOWN = """graph @main (%x : f32[4]@cpu, %y : f32[4]@cpu) {
  %a:2 = aten.split.Tensor(%x, %y) : (f32[4]@cpu, f32[4]@cpu) {capturable = true, region = 3}
  ^stop = "a<b"(%a.0, %a.1, %a.0) {capturable = false}
  %b = aten.neg.default(%x) after(^stop) : f32[4]@cpu
  return (%b)
}"""


def test_a_graph_shows_itself_in_notebooks() -> None:
    shown = parse_graph(SHOWN)._repr_html_()
    assert "a&lt;b" in shown
    assert shown.count("background: #") == 1
    assert "<style" not in shown, "the notebook's own stays"
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == str(parse_graph(SHOWN))
