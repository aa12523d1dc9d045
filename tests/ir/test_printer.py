"""Printing: the exact text of a graph that uses every construct."""

from __future__ import annotations

from pathlib import Path

import pytest

from pygraph.ir import (
    CAPTURABLE,
    REGION,
    SELECTED,
    Cost,
    Device,
    DType,
    Effects,
    Graph,
    GraphRef,
    Location,
    OpaqueType,
    Parameter,
    Region,
    ScalarType,
    TensorType,
    Token,
    Value,
    parse,
    print_graph,
    symbol,
)

CPU, CUDA = Device("cpu"), Device("cuda", 0)
S0 = symbol("s0")

TEXT = Path(__file__).with_name("sample.pgir").read_text(encoding="utf-8")


def sample() -> Graph:
    graph = Graph()
    graph.hints["s0"] = 8
    x = graph.add_input(TensorType(DType.F32, (S0, 16), CPU), "x")
    w = graph.add_input(TensorType(DType.F32, (16, 4), CUDA, (1, 16)), "w", role="parameter", static=True)
    _add_nodes(graph, x, w)
    region = graph.regions[0] = Region(0)
    region.parameters = {x: Parameter("patched", "moves", 0.2), w: Parameter("static", "guarded")}
    region.meta.set(SELECTED, True)
    sub = graph.subgraphs["sub"] = Graph("sub", kind="subgraph")
    sub.add_input(OpaqueType("Generator"), "in 0")
    graph.subgraphs["other"] = Graph("tw\no")
    return graph


def _add_nodes(graph: Graph, x: Value, w: Value) -> None:
    rows = TensorType(DType.F32, (S0, 4), CPU)
    cost = Cost(128 * S0, None, 16 * S0, 1)
    mm = graph.add(
        "aten.mm.default", [x, w], [rows], name="0", cost=cost, loc=Location("model.py", 12, "forward", 'h = "a"')
    )
    mm.meta.set(REGION, 0)
    mm.meta.set(CAPTURABLE, True)
    literals = {"e": S0 + 1, "d": CPU, "t": DType.F16, "g": GraphRef("sub"), "c": complex(1, -0.0)}
    literals["z"] = (None, (), -2, float("-inf"), Token("contiguous_format"))
    results = [TensorType(DType.F32, (S0,), CPU), ScalarType("int", S0 + 1)]
    vm = graph.add("aten.var_mean.correction", [mm.output, (1,)], results, name="vm", attrs=literals)
    stop = graph.add("aten._assert_async", [vm.outputs[1]], name="n7", effects=Effects(barrier=True, sync=True))
    effects = Effects((0,), ((0, 0),), (1,), rng="cuda:0", dynamic=True, collective="0")
    copy = graph.add("aten.copy_.default", [x, mm.output], [rows], name="c", effects=effects)
    graph.add_order(stop, copy)
    graph.set_outputs([copy.output, None, vm.outputs[0]])


def test_the_text_of_a_graph() -> None:
    assert print_graph(sample()) == TEXT
    assert str(sample()) == TEXT


def test_the_text_parses_back() -> None:
    assert parse(TEXT) == sample()


def test_contiguous_strides_are_not_shown() -> None:
    graph = Graph()
    graph.add_input(TensorType(DType.F32, (S0, 4), CPU, (4, 1)), "x")
    assert "f32[s0, 4]@cpu" in str(graph)
    assert parse(str(graph)) == graph


def test_what_has_no_text_is_refused() -> None:
    graph = Graph()
    graph.add("op", [["a", "list"]])
    with pytest.raises(TypeError, match="list has no"):
        str(graph)
