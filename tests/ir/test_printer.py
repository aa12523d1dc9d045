"""Printing: the exact text of a graph that uses every construct, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pygraph.ir import (
    CAPTURABLE,
    REGION,
    Cost,
    Device,
    DType,
    Effects,
    Graph,
    GraphRef,
    Location,
    Parameter,
    ScalarType,
    TensorType,
    Token,
    parse_graph,
    symbol,
)

CPU, CUDA = Device("cpu"), Device("cuda", 0)
S0 = symbol("s0")
TEXT = Path(__file__).with_name("sample.pgir").read_text(encoding="utf-8")


def test_a_text_says_what_the_graph_holds() -> None:
    graph = parse_graph(TEXT)
    assert str(graph) == TEXT
    x, w = graph.inputs
    assert (x.type, x.role, x.static) == (TensorType(DType.F32, (S0, 16), CPU), "input", False)
    assert (w.type, w.role, w.static) == (TensorType(DType.F32, (16, 4), CUDA, (1, 16)), "parameter", True)
    mm, vm, stop, copy = graph.nodes
    assert (mm.args, mm.cost) == ((x, w), Cost(128 * S0, None, 16 * S0, 1))
    assert mm.loc == Location("model.py", 12, "forward", 'h = "a"')
    assert (mm.meta.get(REGION), mm.meta.get(CAPTURABLE)) == (0, True)
    assert [out.type for out in vm.outputs] == [TensorType(DType.F32, (S0,), CPU), ScalarType("int", S0 + 1)]
    literals = {"e": S0 + 1, "d": CPU, "t": DType.F16, "g": GraphRef("sub"), "c": complex(1, -0.0)}
    assert vm.attrs == {**literals, "z": (None, (), -2, float("-inf"), Token("contiguous_format"))}
    assert (stop.outputs, stop.effects) == ((), Effects(barrier=True, sync=True))
    assert copy.effects == Effects((0,), ((0, 0),), (1,), rng="cuda:0", dynamic=True, collective="0")
    assert list(copy.after) == [stop]
    assert graph.outputs == (copy.output, None, vm.outputs[0])
    assert graph.regions[0].parameters == {x: Parameter("patched", "moves"), w: Parameter("static", "guarded")}
    assert {key: found.name for key, found in graph.subgraphs.items()} == {"sub": "sub", "other": "tw\no"}


def test_what_has_no_text_is_refused() -> None:
    graph = Graph()
    graph.add("op", [["a", "list"]])
    with pytest.raises(TypeError, match="list has no"):
        str(graph)
