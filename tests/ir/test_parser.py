"""Parsing: what may be left out, and errors that point at line and column and say what is wrong."""

from __future__ import annotations

import time

import pytest

from pygraph.errors import ParseError
from pygraph.ir import (
    Cost,
    Device,
    DType,
    Effects,
    Graph,
    Location,
    ScalarType,
    Stage,
    TensorType,
    parse,
    symbol,
)

S0 = symbol("s0")


def body(line: str, inputs: str = "%x : f32[4]@cpu") -> str:
    return f"graph @g ({inputs}) {{\n  {line}\n  return ()\n}}"


def error_of(text: str) -> ParseError:
    with pytest.raises(ParseError) as caught:
        parse(text, "file.pgir")
    return caught.value


def test_everything_optional_may_be_left_out() -> None:
    graph = parse("graph @g () { return () }")
    assert (graph.name, graph.kind, graph.stage, graph.outputs) == ("g", "inference", Stage.LIFTED, ())
    value = parse("graph @g (%x : int) { return (%x) }").inputs[0]
    assert (value.role, value.static, value.type) == ("input", False, ScalarType("int"))


def test_clauses_come_in_any_order_and_comments_anywhere() -> None:
    graph = parse(body("%a = f(%x, // why\n ) !sync : f32[4]@cpu !writes[0,] // end"))
    assert graph.nodes[0].effects == Effects(writes=(0,), sync=True)


def test_words_of_the_grammar_are_names_too() -> None:
    text = body(
        '%return = graph(%x, after = 1, regions = 2, flops = 3, "in" = true) : f32[4]@cpu {graph = 1, static = 2}'
    )
    node = parse(text).nodes[0]
    assert (node.name, node.op) == ("return", "graph")
    assert list(node.attrs) == ["after", "regions", "flops", "in"]
    assert node.meta.items() == [("graph", 1), ("static", 2)]
    assert node.cost == Cost()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + s0*(4*4)", 16 * S0 + 1),
        ("2*-s0", -2 * S0),
        ("-s0**2", -(S0**2)),
        ("2**3**2", 512),
        ("7 % 4", 3),
        ("s0 % 4 * 2", parse(body("^a = f($(2*Mod(s0, 4)))")).nodes[0].args[0]),
        ("FloorDiv(8, 3)", 2),
        ("CeilDiv(s0, 1)", S0),
        ("Max(1, 2, 3)", 3),
    ],
)
def test_expressions(text: str, value: object) -> None:
    assert parse(body(f"^a = f($({text}))")).nodes[0].args == (value,)


def test_source_lines_and_costs() -> None:
    node = parse(body('^a = f(%x) {loc = "dir/a:b.py:7", code = "x", flops = s0}')).nodes[0]
    assert node.loc == Location("dir/a:b.py", 7, "", "x")
    assert node.cost == Cost(flops=S0)


def test_operands_may_be_defined_later() -> None:
    graph = parse(body("^a = f(%b)\n  %b = g(%x) : f32[4]@cpu"))
    assert graph.nodes[0].inputs == (graph.nodes[1].output,)
    assert list(graph.nodes[1].output.users) == [graph.nodes[0]]


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ("^a = f(%y)", 10, "unknown value %y"),
        ("^a = f(%x.0)", 10, "unknown value %x.0"),
        ("%a:2 = f(%a) : (int, int)", 12, "%a: node 'a' has 2 results"),
        ("%a:2 = f(%a.2) : (int, int)", 12, "%a.2: node 'a' has 2 results"),
        ("%a = f(%a.0) : int", 10, "%a.0: node 'a' has 1 result"),
        ("%x = f() : int", 3, "the name 'x' is taken in graph g"),
        ("%a:2 = f() : int", 6, "2 results but 1 type"),
        ("%a:99999999999 = f() : int", 6, "999999999 results but 1 type"),
        ("%a = f()", 3, "1 result but 0 types"),
        ("%a = f() : (int, int)", 3, "1 result but 2 types"),
        ("%a.0 = f() : int", 3, "a definition has no index: write %a"),
        ("^a = f() : int", 3, "'^' names a node without results: write % where there are some"),
        ("^a = f() after(^b)", 18, "unknown node ^b"),
        ("^a = f() after(^a)", 18, "node ^a cannot run before itself"),
        ("%a = f() : int : int", 18, "types are given twice"),
        ("%a = f() : g32[4]@cpu", 14, "unknown dtype 'g32': use one of f64"),
        ("%a = f() : f32", 14, "'f32' is no scalar type: a tensor is written dtype[sizes]@device"),
        ("%a = f() : integer", 14, "'integer' is no scalar type: use int, float or bool"),
        ('%a = f() : opak<"x">', 14, "unknown type 'opak'"),
        ("^a = f(flase)", 10, "unknown word 'flase'"),
        ("^a = f(grape @b)", 10, "unexpected 'grape': a subgraph is written graph @name"),
        ("^a = f(complicated(1, 2))", 10, "unexpected 'complicated'"),
        ("^a = f(-oo)", 11, "'oo' is no number: use digits, inf or nan"),
        ("^a = f(k = 1, %x)", 3, "an operand cannot follow an attribute"),
        ("^a = f(k = 1, k = 2)", 17, "'k' is given twice"),
        ("^a = f() !wirtes[0]", 13, "unknown effect 'wirtes'"),
        ("^a = f() !writes[0:0]", 13, "write !writes[0]"),
        ("^a = f() !aliases[0]", 13, "write !aliases[0:0]"),
        ("^a = f() !writes", 13, "write !writes[0]"),
        ("^a = f() !rng", 13, 'write !rng("name")'),
        ("^a = f() !sync[0]", 13, "write !sync"),
        ("^a = f() !sync !sync", 19, "effect 'sync' is given twice"),
        ("^a = f() {k = 1, k = 2}", 20, "'k' is given twice"),
        ("^a = f() {k = [%x]}", 13, "an annotation holds literals, no values"),
        ('^a = f() {region = "0"}', 13, "annotation 'region' must be int"),
        ('^a = f() {"flops" = 1}', 13, "'flops' cannot be an annotation here: the name is reserved"),
        ('^a = f() {loc = "here"}', 13, 'a source line is written loc = "file:line"'),
        ('^a = f() {code = "x"}', 13, 'a source line is written loc = "file:line"'),
        ("^a = f() {loc = 3}", 13, "'loc' must be a string"),
        ('^a = f("\\q")', 10, "unknown escape '\\q'"),
        ('^a = f("open)', 10, "this string is not closed on its line"),
        ("^a = f($(Mod(1, 0)))", 12, "not an expression:"),
        ("^a = f($(floor()))", 12, "not an expression: floor takes exactly 1 argument (0 given)"),
        ("^a = f($(9**9**9))", 12, "not an expression: this power takes too many digits"),
        ("^a = f($((2*s0)**99999))", 12, "not an expression: this power takes too many digits"),
        ("^a = f($(1e999))", 12, "not an expression: 1e999 exceeds the range of a double"),
        ("^a = f($(" + "9" * 5000 + "))", 12, "not an expression:"),
        ("^a = f(" + "9" * 5000 + ")", 10, "this integer has too many digits"),
        ("^a = f(" + "[" * 101, 108, "brackets are nested more than 100 deep"),
        ("^a = f(\0)", 10, "unexpected character '\\x00'"),
        ("^a == f()", 7, "unexpected '='"),
    ],
)
def test_errors_point_at_the_place(line: str, column: int, reason: str) -> None:
    error = error_of(body(line))
    assert reason in error.reason
    assert (error.span.line, error.span.column) == (2, column)
    message, shown, carets = str(error).split("\n")
    assert message.startswith(f"file.pgir:2:{column}: {reason}")
    assert shown == "  " + line
    assert carets.startswith(" " * (column - 1) + "^")


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", (1, 1), "the text ends too early: expected 'graph'"),
        ("graph @g ()", (1, 12), "the text ends too early: expected '{'"),
        ("graph @g () {\n  return ()\n\n", (2, 12), "the text ends too early"),
        ("graph @g {stage = lfited} () { return () }", (1, 19), "unknown stage 'lfited': use one of lifted"),
        ("graph @g {stage = {a = 1}} () { return () }", (1, 11), "'stage' takes a name"),
        ("graph @g {hints = a} () { return () }", (1, 11), "'hints' takes {symbol = value}"),
        ("graph @g {kin = a} () { return () }", (1, 11), "unknown setting 'kin'"),
        ("graph @g {kind = a, kind = b} () { return () }", (1, 21), "'kind' is given twice"),
        ("graph @g {hints = {a = 1, a = 2}} () { return () }", (1, 27), "'a' is given twice"),
        ("graph @g (%x : int {rloe = input}) { return () }", (1, 21), "an input takes"),
        ("graph @g (%x : int, %x : int) { return () }", (1, 21), "the name 'x' is taken"),
        ("graph @g () { return (%x) }", (1, 23), "unknown value %x"),
        ("graph @g () { return () } regions { 0 () 0 () }", (1, 42), "region 0 is given twice"),
        ("graph @g () { return () } regions { 0 {flops = 1} () }", (1, 40), "'flops' cannot be an annotation"),
        ('graph @g () { return () } regions { 0 (%x: static "") }', (1, 40), "unknown value %x"),
        (
            "graph @g () { return () } subgraphs { graph @a () { return () } @a = graph @b () { return () } }",
            (1, 65),
            "two subgraphs",
        ),
        ("graph @g () { return () } graph @h () { return () }", (1, 27), "unexpected 'graph'"),
    ],
)
def test_errors_outside_of_nodes(text: str, place: tuple[int, int], reason: str) -> None:
    error = error_of(text)
    assert reason in error.reason
    assert (error.span.line, error.span.column) == place


def test_large_texts_parse_in_seconds() -> None:
    graph = Graph()
    tensor = TensorType(DType.F32, (S0, 64), Device("cuda", 0))
    value = first = graph.add_input(tensor)
    for line in range(2000):
        node = graph.add(
            "aten.add.Tensor", [value, first], [tensor], cost=Cost(64 * S0 + line, 8, 8, 1), loc=Location("a", line)
        )
        value = node.output
    text = str(graph)
    start = time.process_time()
    assert len(parse(text)) == 2000
    assert time.process_time() - start < 10


CHOICES = [f"s{i}" for i in range(300)]


@pytest.mark.parametrize(
    "size",
    [
        "(1/3)**65535",
        "9" * 5000,
        f"Max({', '.join(CHOICES)})",
        "Max(" * 60 + "a" + "".join(f", Min(b{i}, c{i}))" for i in range(60)),
        f"{'Max(' * 300}a{''.join(f', {name})' for name in CHOICES)}",
        "Mod((a + b + c)**200, 7)",
        "(a + b + c)**200 % d",
        "(a + b)**20*(c + d)**20 % 7",
        f"Mod({'*'.join(f's{i}' for i in range(3000))}, 7)",
        "*".join(f"s{i}" for i in range(5000)),
        "*".join(f"Mod(s{i}, 7)" for i in range(2000)),
        "floor(" * 90 + "a/7" + "+b)/3" * 90,
        "a" + "".join(f" % {name}" for name in CHOICES),
    ],
    ids=lambda size: size[:24],
)
def test_an_expression_that_would_take_sympy_long_is_refused_at_once(size: str) -> None:
    text = f"graph @main (\n  %x : f32[{size}]@cpu) {{\n  return (%x)\n}}\n"
    start = time.process_time()
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert caught.value.span.line == 2, "points at the place"
    assert time.process_time() - start < 2, "seconds; a busy machine has half of them to spare"


def test_an_escape_beyond_unicode_is_refused() -> None:
    with pytest.raises(ParseError, match=r"there is no character '\\UFFFFFFFF'"):
        parse('graph @main (%"\\UFFFFFFFF" : f32[8]@cpu) {\n  return (%"\\UFFFFFFFF")\n}\n')
