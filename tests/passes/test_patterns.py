"""Rewrites by pattern: what matches, what takes its place, and what is left alone."""

from __future__ import annotations

import pytest
import torch

import pygraph
from pygraph.errors import ParseError, PygraphError
from pygraph.ir import REGION, Graph, GraphError, parse_graph, sources, verify
from pygraph.ir.interp import interpret
from pygraph.passes import Found, PassManager, as_pass, rewrite

T = "f32[4]@cpu"


def graph_of(*lines: str, returns: str = "%r") -> Graph:
    inputs = f"%x : {T}, %y : {T}"
    return parse_graph(f"graph @main ({inputs}) {{\n" + "\n".join(lines) + f"\nreturn ({returns})\n}}")


def ops(graph: Graph) -> list[str]:
    verify(graph)
    return [node.op.split(".")[1] for node in graph.nodes]


def fused(found: Found) -> object:
    return found.add("aten.addcmul.default", (found["b"], found["a"], found["a"]))


SUM = "aten.add.Tensor(aten.mul.Tensor(%a, %a), %b)"


def test_nested_calls_match_by_operand_and_literal() -> None:
    graph = graph_of(
        f"%m = aten.mul.Tensor(%x, %x) : {T}",
        f'%r = aten.add.Tensor(%m, %y) : {T} {{in = "layers.3", loc = "net.py:4", function = "forward"}}',
    )
    assert rewrite(graph, SUM, fused) == 1
    (node,) = graph.nodes
    assert (ops(graph), node.args, str(node.loc), node.module) == (
        ["addcmul"], (graph.inputs[1], *[graph.inputs[0]] * 2), "net.py:4", "layers.3"
    )  # fmt: skip
    assert [source.op for source in sources(node)] == ["aten.addcmul.default", "aten.add.Tensor", "aten.mul.Tensor"]
    for pattern in ("aten.sum.dim_IntList(%x, [0])", "aten.sum.dim_IntList(%x, [1], keepdim = true)"):
        graph = graph_of("%r = aten.sum.dim_IntList(%x, [0], keepdim = true) : f32[1]@cpu")
        assert rewrite(graph, pattern, lambda found: found["x"]) == 0
    assert rewrite(graph, "aten.sum.dim_IntList(%x, [0], keepdim = true)", lambda found: found["x"]) == 1
    assert graph.outputs == (graph.inputs[0],)


@pytest.mark.parametrize(
    "lines",
    [
        (f"%m = aten.mul.Tensor(%x, %y) : {T}", f"%r = aten.add.Tensor(%m, %y) : {T}"),
        (f"%m = aten.mul.Tensor(%x, %x) : {T}", f"%r = aten.add.Tensor(%m, %y, alpha = 2) : {T}"),
        (
            f"%m = aten.mul.Tensor(%x, %x) : {T}",
            f"%w = aten.copy_.default(%x, %y) : {T} !reads[1] !writes[0] !aliases[0:0]",
            f"%r = aten.add.Tensor(%m, %y) : {T}",
        ),
        (
            f"%m = aten.mul.Tensor(%x, %x) : {T}",
            f"%r = aten.add.Tensor(%m, %y) : {T} !writes[0] !aliases[0:0]",
        ),
        (
            f"%m = aten.mul.Tensor(%x, %x) : {T}",
            f"%n = aten.relu.default(%x) : {T}",
            f"%r = aten.add.Tensor(%m, %y) after(^n) : {T}",
        ),
    ],
    ids=["another operand", "an attribute", "written in between", "writes", "ordered"],
)
def test_what_would_mean_something_else_does_not_match(lines: tuple[str, ...]) -> None:
    graph = graph_of(*lines)
    before = str(graph)
    assert rewrite(graph, SUM, fused) == 0
    assert str(graph) == before


def test_what_others_use_stays_and_rewrites_of_rewrites_come_to_an_end() -> None:
    graph = graph_of(f"%m = aten.mul.Tensor(%x, %x) : {T}", f"%r = aten.add.Tensor(%m, %y) : {T}", returns="%m, %r")
    assert (rewrite(graph, SUM, fused), ops(graph)) == (1, ["mul", "addcmul"])
    chain = graph_of(*(f"%{b} = aten.relu.default(%{a}) : {T}" for a, b in ("xa", "ab", "bc", "cr")))
    pair = "aten.relu.default(aten.relu.default(%x))"
    assert rewrite(chain, pair, lambda found: found.add("aten.relu.default", (found["x"],))) == 3
    assert ops(chain) == ["relu"]
    with pytest.raises(PygraphError, match="still matches: it matches what replaces it"):
        rewrite(chain, "aten.relu.default(%x)", lambda found: found.add("aten.relu.default", (found["x"],)))
    assert rewrite(chain, "aten.relu.default(%x)", lambda _: None) == 0
    with pytest.raises(ParseError, match=r"<pattern>:1:18: .*expected"):
        rewrite(chain, "aten.relu.default", fused)


def test_a_rewrite_is_compiled_and_keeps_regions() -> None:
    @as_pass
    def relu_to_clamp(graph: Graph, ctx: object) -> bool:
        del ctx
        return rewrite(graph, "aten.relu.default(%x)", lambda at: at.add("aten.clamp_min.default", (at["x"], 0))) > 0

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    pipeline = ["legality,placement,partitioning", relu_to_clamp(), "indirection,selection"]
    ours, x = torch.compile(model, backend="pygraph", options={"passes": pipeline}), torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    graph = pygraph.reports()[-1].graph
    clamps = [node for node in graph.nodes if "clamp" in node.op]
    assert [node.module for node in clamps] == ["1", "3"]
    assert all(node.meta.get(REGION) == 0 for node in clamps)


def test_regions_are_merged_where_an_order_is_left() -> None:
    text = f"""graph @main (%x : {T}) {{
      %a = aten.relu.default(%x) : {T} {{launches = 1}}
      %b = aten.exp.default(%a) : {T} {{launches = 1}}
      %n = aten._local_scalar_dense.default(%b) : float !sync
      %c = aten.mul.Tensor(%a, %n) : {T} {{launches = 1}}
      %d = aten.exp.default(%a) : {T} {{launches = 1}}
      return (%c, %d)
    }}"""
    graph = parse_graph(text)
    PassManager("legality,placement,partitioning,indirection,selection").run(graph)
    assert sorted(graph.regions) == [0, 1]
    before = str(graph)
    with pytest.raises(GraphError, match=r"regions 0 and 1 cannot be one: .*region 0 → n → region 0"):
        graph.merge_regions(0, 1)
    with pytest.raises(GraphError, match="has no region 7: it has 0, 1"):
        graph.merge_regions(0, 7)
    assert str(graph) == before
    free = parse_graph(
        text.replace(" !sync", "").replace("_local_scalar_dense.default(%b) : float", "sum.default(%a) : f32[]@cpu")
    )
    PassManager("legality,placement,partitioning").run(free)
    free.regions.clear()
    for i, node in enumerate(free.nodes):
        node.meta.set(REGION, i // 2)
    free.regions.update({i: type(graph.regions[0])() for i in range(3)})
    verify(free)
    PassManager("indirection,selection").run(free)
    meaning = interpret(free)
    free.merge_regions(2, 0)
    verify(free)
    assert {node.name: node.meta.get(REGION) for node in free.nodes} == {"a": 2, "b": 2, "n": 1, "c": 1, "d": 2}
    assert interpret(free) == meaning
