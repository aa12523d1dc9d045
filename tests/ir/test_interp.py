"""The interpreter: values by numbers, meaning by terms."""

from __future__ import annotations

import pytest

from pygraph.ir import Device, Graph, parse
from pygraph.ir.interp import InterpretError, Outcome, Returned, interpret
from pygraph.ir.memory import RangedMemory
from pygraph.ir.numbers import NumericDomain
from pygraph.ir.terms import Term

V = "f32[2]@cpu"


def graph_of(lines: str, outputs: str = "", inputs: str = f"%x : {V}, %y : {V}") -> Graph:
    return parse(f"graph @g ({inputs}) {{\n{lines}\nreturn ({outputs}) }}")


def numbers(graph: Graph, **inputs: object) -> Outcome:
    return interpret(graph, inputs, NumericDomain())


def contents(outcome: Outcome) -> list[object]:
    return [output.content if isinstance(output, Returned) else output for output in outcome.outputs]


def same(one: str, other: str, outputs: str = "%z", **options: str) -> bool:
    return interpret(graph_of(one, outputs, **options)) == interpret(graph_of(other, outputs, **options))


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_operators_by_value() -> None:
    lines = """
      %a = aten.add.Tensor(%x, 1) : f32[2, 2]@cpu
      %m = aten.mm.default(%a, %x) : f32[2, 2]@cpu
      %p = aten.mul.Tensor(%m, -1.0) : f32[2, 2]@cpu
      %r = aten.relu.default(%p) : f32[2, 2]@cpu
      %s = aten.sum.default(%m) : f32[]@cpu
      %i = aten._local_scalar_dense.default(%s) : float !sync
    """
    outcome = numbers(graph_of(lines, "%m, %r, %i, None, [%a]"), x=[[1, 2], [3, -4]], y=[0, 0])
    m, r, i, none, (a,) = outcome.outputs
    assert m.content == [[11, -8], [-5, 20]]
    assert r.content == [[0.0, 8.0], [5.0, 0.0]]
    assert (i.content, i.memory) == (18, ())
    assert none is None
    assert a.content == [[2, 3], [4, -3]]


def test_mutation_through_aliases_by_value() -> None:
    lines = f"""
      %v = aten.alias.default(%x) : {V} !aliases[0:0] !reads[]
      %before = aten.add.Tensor(%v, 0) : {V}
      %c = aten.copy_.default(%v, %y) : {V} !writes[0] !aliases[0:0] !reads[1]
      %d = aten.add_.Tensor(%x, 5) : {V} !writes[0] !aliases[0:0]
    """
    outcome = numbers(graph_of(lines, "%before, %v, %c, %d, %y"), x=[1, 2], y=[3, 4])
    assert contents(outcome) == [[1, 2], [8, 9], [8, 9], [8, 9], [3, 4]]
    assert outcome.written == {"x": [8, 9]}
    assert [output.memory for output in outcome.outputs] == [("result 0",), ("x",), ("x",), ("x",), ("y",)]


def test_random_numbers_count_draws_per_generator() -> None:
    draw = '%{} = aten.rand.default([2]) : f32[2]@cpu !rng("{}")'
    both = numbers(graph_of(draw.format("a", "cpu") + draw.format("b", "cpu"), "%a, %b"), x=[], y=[])
    a, b = contents(both)
    assert a != b
    assert both.draws == {"cpu": 2}
    mixed = numbers(graph_of(draw.format("a", "cpu") + draw.format("b", "cuda:0"), "%a, %b"), x=[], y=[])
    assert contents(mixed) == [a, a]


def test_moves_copy_by_value() -> None:
    lines = f"""
      %u = pygraph.upload([%x], @cuda:0) : f32[2]@cuda:0
      %w = aten.add_.Tensor(%u, 1) : {V} !writes[0] !aliases[0:0]
    """
    outcome = numbers(graph_of(lines, "%u, %x"), x=[1, 2], y=[])
    assert contents(outcome) == [[2, 3], [1, 2]]
    assert outcome.written == {}
    assert outcome.outputs[0].device == Device("cuda", 0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"%z = aten.conv.default(%x) : {V}", "no operator aten.conv.default"),
        (
            f"%v = aten.t.default(%x) : {V} !aliases[0:0]\n%z = aten.relu.default(%v) : {V}",
            "no operator aten.t.default",
        ),
        (f"%z = aten.mm.default(%x, %y) : {V}", "needs matrices"),
        (f"%z = aten.add.Tensor(%x, [%y]) : {V}", "is no array"),
        (f"%z = aten.add.Tensor(%x, %y) : {V}", "different lengths"),
        (f"%z = aten.rand.default([2]) : {V}", "needs a size and a generator"),
    ],
)
def test_what_numbers_do_not_know(line: str, reason: str) -> None:
    with pytest.raises(InterpretError, match=reason):
        numbers(graph_of(line), x=[1, 2], y=[1, 2, 3])
    with pytest.raises(InterpretError, match="was not given"):
        numbers(graph_of(line))


# -- terms -------------------------------------------------------------------------------------------------------------


def test_terms_are_equal_when_computed_alike() -> None:
    assert Term("f", 1, (Term("g"),)) == Term("f", 1, (Term("g"),))
    assert Term("f", 1) != Term("f", True) != Term("f", "1")
    assert len({Term("f", 1), Term("f", 1), Term("g", 1)}) == 2
    assert repr(Term("f", 1, (Term("g", "x"),))) == 'f(1, [g("x")])'


def test_names_of_nodes_do_not_matter_but_operands_and_attributes_do() -> None:
    add = "%a = aten.add.Tensor(%x, {}) : f32[2]@cpu\n%z = aten.relu.default(%a) : f32[2]@cpu"
    assert same(add.format("%y"), add.format("%y").replace("%a", "%b"))
    assert not same(add.format("%y"), add.format("%x"))
    assert not same(add.format("%y"), add.format("%y, alpha = 2"))


def test_devices_do_not_matter_but_where_results_live_does() -> None:
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


def test_casts_are_no_moves() -> None:
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


def test_given_contents_replace_inputs() -> None:
    graph = graph_of("%z = f(%x) : f32[2]@cpu", "%z")
    assert interpret(graph, {"x": Term("t")}) != interpret(graph)


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
    assert interpret(parse(text.format("1"))) == interpret(parse(text.format("1")))
    assert interpret(parse(text.format("1"))) != interpret(parse(text.format("2")))


def test_deep_graphs_are_no_problem() -> None:
    lines = "\n".join(f"%a{i} = f(%a{i - 1}, %a{i - 1}) : f32[2]@cpu" for i in range(1, 3000))
    graph = graph_of("%a0 = f(%x, %x) : f32[2]@cpu\n" + lines, "%a2999")
    assert interpret(graph) == interpret(graph.clone())


# -- launches ----------------------------------------------------------------------------------------------------------


def launches(*lines: str) -> Outcome:
    inputs = "%a : buffer[64]@cpu, %b : buffer[64]@cpu"
    return interpret(parse(f"graph @g {{stage = recorded}} ({inputs}) {{ {' '.join(lines)} return () }}"))


def test_launches_write_ranges() -> None:
    low = "^l = low(%a, ranges = [[0, 32]]) !writes[0] !reads[]"
    high = "^h = high(%a, ranges = [[32, 32]]) !writes[0] !reads[]"
    across = "^c = copy(%a, %b, ranges = [[16, 32], [0, 32]]) !reads[0] !writes[1]"
    assert launches(low, high, across) == launches(high, low, across)
    assert launches(low, high, across) != launches(low, across, high)
    assert set(launches(low, high, across).written) == {"a", "b"}
    over = "^o = over(%a) !writes[0] !reads[]"
    assert launches(low, high, over) == launches(over)


def test_ranged_memory() -> None:
    memory = RangedMemory("old")
    memory.write(8, 16, "new")
    memory.write(10, 10, "nothing")
    assert memory.read(4, 20) == ((0, 4, 4, "old"), (4, 8, 0, "new"), (12, 4, 16, "old"))
    assert memory.read(9, 11) == ((0, 2, 1, "new"),)
    assert memory.read(9, 9) == ()
    memory.write(8, 12, "old")
    assert [piece.content for piece in memory.pieces()] == ["old", "old", "new", "old"]
