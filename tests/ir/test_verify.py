"""The verifier: each rule, on the smallest graph that breaks it and on one that keeps it."""

from __future__ import annotations

import pytest
import sympy

from pygraph.errors import VerifyError
from pygraph.ir import Cost, Device, DType, Graph, ScalarType, Stage, TensorType, parse_graph, symbol, verify

CPU = Device("cpu")
T = TensorType(DType.F32, (4,), CPU)


def violation(graph: Graph, stage: Stage | None = None) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        verify(graph, stage)
    return caught.value


def broken(text: str) -> VerifyError:
    return violation(parse_graph(text))


def simple() -> Graph:
    return parse_graph(
        "graph @g {operators = [f]} (%x : f32[4]@cpu) { %a = f(%x) : f32[4]@cpu  %b = f(%a) : f32[4]@cpu  return (%b) }"
    )


def test_errors_name_rule_node_and_stage() -> None:
    verify(simple())
    error = violation(simple(), Stage.SELECTED)
    assert (error.rule, error.node, error.stage) == ("judged", "a", "selected")
    assert "at node a (stage selected, rule judged)" in str(error)


def test_what_a_text_cannot_say() -> None:
    graph = simple()
    graph.nodes[1].name = "a"
    assert violation(graph).rule == "names"
    graph = simple()
    graph.nodes[0].output.users.clear()
    assert violation(graph).rule == "links"
    graph = simple()
    graph.nodes[1].args = ()
    assert "flattened" in violation(graph).reason
    graph = simple()
    graph.nodes[0].output.producer = graph.nodes[1]
    assert violation(graph).rule == "links"
    graph = simple()
    graph.nodes[1].inputs = graph.nodes[1].args = (simple().inputs[0],)  # type: ignore[assignment]  # broken on purpose
    assert "belongs to no node" in violation(graph).reason
    graph = simple()
    graph.nodes[1].after = {simple().nodes[0]: None}
    assert "which is not in this graph" in violation(graph).reason
    graph = simple()
    graph._outputs = (simple().inputs[0],)
    assert violation(graph).rule == "outputs"
    graph = simple()
    graph.add_input(ScalarType("long"))
    assert violation(graph).rule == "types"


@pytest.mark.parametrize(
    ("inputs", "nodes", "rule"),
    [
        ("", "%a = f(%b) : int  %b = f() : int", "order"),
        ("", "^a = f() after(^b)  ^b = f()", "order"),
        ("", "%a = f(%a) : int", "order"),
        ("%x : f32[4]@cpu", "%a = f(%x) : f32[4]@cpu !writes[1]", "effects"),
        ("%x : f32[4]@cpu", "%a = f(%x) : f32[4]@cpu !writes[0, 7]", "effects"),
        ("%x : f32[4]@cpu", "%a = f(%x) : f32[4]@cpu !reads[-1]", "effects"),
        ("%x : f32[4]@cpu", "%a = f(%x) : f32[4]@cpu !aliases[0:1]", "effects"),
        ("%x : f32[4]@cpu", "%a = f(%x) : f32[4]@cpu !aliases[1:0]", "effects"),
        ("%x : int", "^a = f(%x) !writes[0]", "effects"),
        ("%x : f32[-1]@cpu", "", "types"),
        ("%x : f32[4]{-1}@cpu", "", "types"),
        ("%x : f32[4, 4]{1}@cpu", "", "types"),
        ('%x : opaque<"">', "", "types"),
        ("", "^a = cond([graph @b])", "subgraphs"),
    ],
)
def test_structure(inputs: str, nodes: str, rule: str) -> None:
    error = broken(f"graph @g ({inputs}) {{ {nodes} return () }}")
    assert (error.rule, error.node) == (rule, "a" if nodes else None)


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Symbol("s0", positive=True),
        sympy.pi,
        sympy.Float(1, 30),
        sympy.Piecewise((1, sympy.Symbol("s") > 1)),
        sympy.zoo,
        sympy.nan + symbol("s0"),
    ],
)
def test_expressions(expression: sympy.Expr) -> None:
    for type in (TensorType(DType.F32, (expression,), CPU), ScalarType("int", expression)):
        graph = Graph()
        graph.add_input(type)
        assert violation(graph).rule == "expressions"
    graph = Graph()
    graph.add("f", cost=Cost(read=expression))
    assert violation(graph).rule == "expressions"


X = "%x : f32[8, 8]@cuda:0, %h : f16[8, 8]@cuda:0, %s : f32[]@cpu, %n : f32[s0, 8]@cuda:0"


@pytest.mark.parametrize(
    "line",
    [
        "%r = aten.relu.default(%x) : f32[8, 8]@cuda:0",
        "%r = aten.add.Tensor(%x, %h, alpha = 2) : f32[8, 8]@cuda:0",
        "%r = aten.add.Tensor(%x, %s) : f32[8, 8]@cuda:0",
        "%r = aten.add.Tensor(%x, other = %n) : f32[8, 8]@cuda:0",
        "%r = aten.mul.Tensor(%x, complex(1, 1)) : c64[8, 8]@cuda:0",
        "%r = aten.mul.Tensor(%x, complex(0, 0)) : c64[8, 8]@cuda:0",
        "%r = aten.gt.Scalar(%x, 0) : b8[8, 8]@cuda:0",
        "%r = aten.view.dtype(%x, i32) : i32[8, 8]@cuda:0",
        "%r:2 = aten.split.Tensor(%x, 4) : (f32[4, 8]@cuda:0, f32[4, 8]@cuda:0)",
        "%r:2 = aten.convolution_backward.default(%x, %x, %x, None, [1], [0], [1], false, [0], 1, [true, true, false])"
        " : (f32[8]@cuda:0, f32[8]@cuda:0)",
        "%r = mylib.scale.default(%x, 1, 2) : f16[4, 99]@cpu",
        "%r = hop.cond(%s, [%x]) : f32[]@cpu",
        "%r = sym.floordiv(7, 2) : int",
    ],
)
def test_operators_of_torch_and_declared_ones(line: str) -> None:
    verify(parse_graph(f"graph @g {{operators = [mylib.scale.default]}} ({X}) {{ {line} return () }}"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "%r = aten.rleu.default(%x) : f32[8, 8]@cuda:0",
            "is no operator of torch's; did you mean 'aten.relu.default'?",
        ),
        ("%r = relu(%x) : f32[8, 8]@cuda:0", "(a custom operator is declared: graph @g {operators = [relu]})"),
        ("%r = mylib.scales.default(%x) : f32[8, 8]@cuda:0", "is no operator of torch's"),
        ("^r = hop.condd(%x)", "is no operator of torch's; did you mean 'hop.cond'?"),
        (
            "%r = aten.relu.default(%x) : f16[4, 99]@cuda:0",
            "returns sizes [8, 8] for f32[8, 8]@cuda:0, and has the result f16",
        ),
        ("%r = aten.relu.default(%n) : f32[8]@cuda:0", "returns sizes [s0, 8] for f32[s0, 8]@cuda:0"),
        (
            "%r = aten.relu.default(%x) : f16[8, 8]@cuda:0",
            "returns f32 for f32[8, 8]@cuda:0, and has the result f16[8, 8]",
        ),
        ("%r = aten.gt.Scalar(%x, 0) : f32[8, 8]@cuda:0", "returns b8 for "),
        ("%r = aten.add.Tensor(%x, %s) : f32[8, 8]@cpu", "returns a tensor on cuda:0 for "),
        ("%r = aten.mm.default(%x, %x, %x) : f32[8, 8]@cuda:0", "takes 2 arguments by position, and has 3"),
        ("%r = aten.mm.default(%x) : f32[8, 8]@cuda:0", "lacks its argument 'mat2': it is (self, mat2) -> 1"),
        (
            "%r = aten.sum.default(%x, keepdims = true) : f32[]@cuda:0",
            "has no argument 'keepdims': it is (self, *, dtype?)",
        ),
        ("%r = aten.relu.default(%x, self = %x) : f32[8, 8]@cuda:0", "is given its argument 'self' twice"),
        ("%r = aten.var_mean.correction(%x) : f32[]@cuda:0", "returns 2 results, and has 1"),
        ("^r = aten.relu.default(%x)", "returns 1 results, and has 0"),
    ],
)
def test_other_operators_calls_and_results_are_refused(line: str, reason: str) -> None:
    line += ' {loc = "net.py:3"}'
    error = broken(f"graph @g {{operators = [mylib.scale.default]}} ({X}) {{ {line} return () }}")
    assert (error.rule, error.node) == ("operators", "r")
    assert reason in error.reason
    assert error.reason.startswith(f"{line.split()[2].partition('(')[0]} at net.py:3 ")


def test_subgraphs_are_verified_too() -> None:
    inner = "graph @b {operators = [f]} () { ^bad = f() !writes[0] return () }"
    assert (
        broken(
            f"graph @g {{operators = [cond]}} () {{ ^a = cond(k = graph @b) return () }} subgraphs {{ {inner} }}"
        ).node
        == "bad"
    )


def test_judged() -> None:
    head = "graph @g {stage = judged, operators = [f]} () { ^a = f() {capturable = "
    verify(parse_graph(head + "true} return () }"))
    verify(parse_graph(head + 'false, reason = "sync"} return () }'))
    assert broken(head + "false} return () }").rule == "judged"


CHAIN = """graph @g {{stage = partitioned, operators = [f]}} (%x : f32[4]@cpu) {{
  %a = f(%x) : f32[4]@cpu {{{a}}}
  %b = f(%a) : f32[4]@cpu {{{b}}}
  %c = f(%b) : f32[4]@cpu {{{c}}}
  return (%c)
}} regions {{ {table} }}"""
IN0, IN1, OUT = "capturable = true, region = 0", "capturable = true, region = 1", 'capturable = false, reason = "sync"'


@pytest.mark.parametrize(
    ("a", "b", "c", "table", "rule", "node"),
    [
        (IN0, IN0, IN0, "0 ()", None, None),
        (IN0, OUT, IN1, "0 () 1 ()", None, None),
        (IN0, IN1, 'capturable = true, reason = "max-regions"', "0 () 1 ()", None, None),
        (IN0, IN0, "capturable = true", "0 ()", "membership", "c"),
        (IN0, OUT + ", region = 0", IN0, "0 ()", "membership", "b"),
        (IN0, IN0, IN1, "0 ()", "table", "c"),
        (IN0, IN0, IN0, "0 () 1 ()", "table", None),
        (IN0, OUT, IN0, "0 ()", "quotient", "a"),
        (IN0, IN1, IN0, "0 () 1 ()", "quotient", "a"),
    ],
)
def test_partitioned(a: str, b: str, c: str, table: str, rule: str | None, node: str | None) -> None:
    graph = parse_graph(CHAIN.format(a=a, b=b, c=c, table=table))
    if rule is None:
        verify(graph)
        return
    error = violation(graph)
    assert (error.rule, error.node) == (rule, node)


def test_the_quotient_is_acyclic_through_effects_too() -> None:
    text = """graph @g {{stage = partitioned, operators = [f]}} (%x : f32[4]@cpu, %y : f32[4]@cpu) {{
      ^a = f(%x) !writes[0] {{{a}}}
      ^b = f(%x) {{{b}}}
      ^c = f(%y) !writes[0] {{{c}}}
      ^d = f(%y) {{{d}}}
      return ()
    }} regions {{ 0 () 1 () }}"""
    verify(parse_graph(text.format(a=IN0, b=IN1, c=IN0, d=IN1)))
    error = broken(text.format(a=IN0, b=IN1, c=IN1, d=IN0))
    assert error.rule == "quotient"
    assert error.reason == "regions and nodes need each other: region 0 → region 1 → region 0"


def test_a_cycle_is_named_apart_from_what_follows_it() -> None:
    graph = parse_graph(CHAIN.format(a=IN0, b=OUT, c=IN0, table="0 ()"))
    late = graph.add("f", [graph.nodes[2].output])
    late.meta = graph.nodes[1].meta.copy()
    assert violation(graph).reason.endswith("region 0 → b → region 0")


PARAMETERS = """graph @g {{stage = {stage}, operators = [f]}} (%x : f32[4]@cpu, %n : int) {{
  %a = f(%x, %n) : f32[4]@cpu {{capturable = true, region = 0}}
  return (%a)
}} regions {{ 0 {{{meta}}} ({table}) }}"""


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ('%x: patched "", %n: static ""', None),
        ('%n: static ""', "takes %x from outside"),
        ('%x: static "", %n: static "", %a: static ""', "does not take its parameter %a"),
        ('%x: guessed "", %n: static ""', "unknown decision 'guessed'"),
    ],
)
def test_parameters(table: str, reason: str | None) -> None:
    graph = parse_graph(PARAMETERS.format(stage="indirected", table=table, meta="k = 1"))
    if reason is None:
        verify(graph)
        return
    error = violation(graph)
    assert error.rule == "parameters"
    assert reason in error.reason


def test_selected() -> None:
    table = '%x: patched "", %n: static ""'
    verify(parse_graph(PARAMETERS.format(stage="selected", table=table, meta='selected = false, reason = "small"')))
    for meta in ("selected = true", 'reason = "small"'):
        assert broken(PARAMETERS.format(stage="selected", table=table, meta=meta)).rule == "selected"
