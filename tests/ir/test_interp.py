"""The interpreter: what counts as the same meaning, and what does not."""

from __future__ import annotations

from pygraph.ir import Graph, parse_graph
from pygraph.ir.interp import Outcome, Returned, interpret

V = "f32[2]@cpu"


def graph_of(lines: str, outputs: str = "", inputs: str = f"%x : {V}, %y : {V}") -> Graph:
    return parse_graph(f"graph @g ({inputs}) {{\n{lines}\nreturn ({outputs}) }}")


def contents(outcome: Outcome) -> list[object]:
    return [output.content if isinstance(output, Returned) else output for output in outcome.outputs]


def same(one: str, other: str, outputs: str = "%z", **options: str) -> bool:
    return interpret(graph_of(one, outputs, **options)) == interpret(graph_of(other, outputs, **options))


def test_names_of_nodes_do_not_matter_but_operands_and_attributes_do() -> None:
    add = "%a = aten.add.Tensor(%x, {}) : f32[2]@cpu\n%z = aten.relu.default(%a) : f32[2]@cpu"
    assert same(add.format("%y"), add.format("%y").replace("%a", "%b"))
    assert not same(add.format("%y"), add.format("%x"))
    assert not same(add.format("%y"), add.format("%y, alpha = 1"))
    assert not same(add.format("%y, alpha = true"), add.format("%y, alpha = 1"))


def test_devices_do_not_matter_but_where_results_live_and_casts_do() -> None:
    host = """
      %f = aten.full.default([2], 1.0, device = @cpu) : f32[2]@cpu
      %u = aten._to_copy.default(%f, device = @cuda:0) : f32[2]@cuda:0
      %z = aten.relu.default({}) : f32[2]@cuda:0
    """
    moved = """
      %f = aten.full.default([2], 1.0, device = @cuda:0) : f32[2]@cuda:0
      %z = aten.relu.default(%f) : f32[2]@cuda:0
    """
    assert same(host.format("%u"), moved)
    batched = """
      %u:2 = pygraph.upload([%x, %y], @cuda:0) : (f32[2]@cuda:0, f32[2]@cuda:0)
      %z = f(%u.0, %u.1) : f32[2]@cuda:0
    """
    assert same(batched, "%z = f(%x, %y) : f32[2]@cuda:0")
    assert not same(batched, "%z = f(%y, %x) : f32[2]@cuda:0")
    assert not same("%z = f(%x) : f32[2]@cuda:0", "%z = f(%x) : f32[2]@cpu")
    cast = "%z = aten._to_copy.default(%x, dtype = f16) : f16[2]@cpu"
    assert not same(cast, "%z = aten._to_copy.default(%x) : f32[2]@cpu")


def test_a_copy_is_not_its_source() -> None:
    copied = interpret(graph_of("%z = aten.clone.default(%x) : f32[2]@cpu", "%z"))
    returned = interpret(graph_of("", "%x"))
    assert contents(copied) == contents(returned)
    assert copied != returned


def test_writes_show_through_views_and_in_inputs() -> None:
    lines = """
      %v = aten.select.int(%x, 0, 1) : f32[2]@cpu !aliases[0:0] !reads[]
      %w = aten.relu_.default(%v) : f32[2]@cpu !writes[0] !aliases[0:0]
      %z = aten.neg.default(%x) : f32[2]@cpu
    """
    outcome = interpret(graph_of(lines, "%z, %w"))
    untouched = interpret(graph_of("%z = aten.neg.default(%x) : f32[2]@cpu", "%z"))
    assert set(outcome.written) == {"x"}
    assert contents(outcome)[0] != contents(untouched)[0]
    assert "put" in repr(outcome.written["x"])


def test_an_ambiguous_alias_may_be_either() -> None:
    lines = """
      %m = maybe(%x, %y) : f32[2]@cpu !aliases[0:0, 0:1]
      %w = aten.relu_.default({}) : f32[2]@cpu !writes[0] !aliases[0:0]
    """
    assert set(interpret(graph_of(lines.format("%m"))).written) == {"x", "y"}
    assert set(interpret(graph_of(lines.format("%x"))).written) == {"x"}
    first, second = (interpret(graph_of(lines.format(name), "%m")).outputs[0] for name in ("%x", "%m"))
    assert first.memory == second.memory == ("x", "y")
    assert first != second


def test_effects_are_sequences() -> None:
    line = '^{} = all_reduce({}) !collective("0")\n'
    one, other = line.format("a", "%x"), line.format("b", "%y")
    assert not same(one + other, other + one, outputs="")
    stop, node = "^s = assert_(%x) !barrier\n", "^n = print_(%y)\n"
    assert not same(stop + node + stop.replace("^s", "^t"), node + stop + stop.replace("^s", "^t"), outputs="")


def test_subgraphs_matter() -> None:
    text = """graph @g (%x : f32[2]@cpu) {{
      %z = cond(%x, graph @s) : f32[2]@cpu
      return (%z)
    }} subgraphs {{ graph @s () {{ return ({}) }} }}"""
    assert interpret(parse_graph(text.format("1"))) == interpret(parse_graph(text.format("1")))
    assert interpret(parse_graph(text.format("1"))) != interpret(parse_graph(text.format("2")))


def test_deep_graphs_are_no_problem() -> None:
    lines = "\n".join(f"%a{i} = f(%a{i - 1}, %a{i - 1}) : f32[2]@cpu" for i in range(1, 3000))
    graph = graph_of("%a0 = f(%x, %x) : f32[2]@cpu\n" + lines, "%a2999")
    assert interpret(graph) == interpret(graph.clone())
