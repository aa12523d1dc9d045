"""Parsing: what may be left out, and errors that point at line and column and say what is wrong."""

from __future__ import annotations

import pytest

from pygraph.errors import ParseError
from pygraph.ir import Location, ScalarType, Stage, parse_graph, symbol
from tests.work import work

S0 = symbol("s0")


def body(line: str, inputs: str = "%x : f32[4]@cpu") -> str:
    return f"graph @g ({inputs}) {{\n  {line}\n  return ()\n}}"


def error_of(text: str) -> ParseError:
    with pytest.raises(ParseError) as caught:
        parse_graph(text, "file.pgir")
    return caught.value


def test_everything_optional_may_be_left_out() -> None:
    graph = parse_graph("graph @g () { return () }")
    assert (graph.name, graph.kind, graph.stage, graph.outputs) == ("g", "inference", Stage.LIFTED, ())
    value = parse_graph("graph @g (%x : int) { return (%x) }").inputs[0]
    assert (value.role, value.static, value.type) == ("input", False, ScalarType("int"))


def test_names_may_have_points_and_a_number_behind_the_last_is_an_index() -> None:
    graph = parse_graph(
        'graph @g (%layers.0.weight : int, %"args.0" : int {placeholder = arg1_1}, %x.1b : int) {'
        ' %args:2 = f(%layers.0.weight, %"args.0", %x.1b) : (int, int)'
        ' ^last.one = g(%args.0, %args.1) after(^args) {in = "layers.0", loc = "a.py:3", frames = ["a.py:9 f"]}'
        " return () }"
    )
    assert [value.name for value in graph.inputs] == ["layers.0.weight", "args.0", "x.1b"]
    assert [value.placeholder for value in graph.inputs] == ["layers.0.weight", "arg1_1", "x.1b"]
    first, last = graph.nodes
    assert (first.inputs, last.inputs) == (graph.inputs, first.outputs)
    assert (last.name, last.module, last.loc) == ("last.one", "layers.0", Location("a.py", 3, frames=("a.py:9 f",)))
    assert 'f(%layers.0.weight, %"args.0", %x.1b)' in str(graph)
    assert parse_graph(str(graph)) == graph


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + s0*(4*4)", 16 * S0 + 1),
        ("2*-s0", -2 * S0),
        ("-s0**2", -(S0**2)),
        ("2**3**2", 512),
        ("7 % 4", 3),
        ("s0 % 4 * 2", parse_graph(body("^a = f($(2*Mod(s0, 4)))")).nodes[0].args[0]),
        ("FloorDiv(8, 3)", 2),
        ("CeilDiv(s0, 1)", S0),
        ("Max(1, 2, 3)", 3),
    ],
)
def test_expressions(text: str, value: object) -> None:
    assert parse_graph(body(f"^a = f($({text}))")).nodes[0].args == (value,)


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ("^a = f(%y)", 10, "unknown value %y"),
        ("^a = f(%x.1)", 10, "%x has 1 results"),
        ("%a:2 = f(%a) : (int, int)", 12, "%a has 2 results: write %name.index"),
        ("%x = f() : int", 3, "the name 'x' is taken in graph g"),
        ("%a:2 = f() : int", 3, "results: 2, types: 1"),
        ("%a:0 = f()", 3, "results: 0, types: 0; ^name has none"),
        ("%a.0 = f() : int", 5, "unexpected '.0': expected '='"),
        ("^a = f() : int", 3, "results: 0, types: 1; ^name has none"),
        ("^a = f() after(^b)", 18, "graph g has no node 'b'"),
        ("^a = f() after(^a)", 18, "node a cannot run before itself"),
        ("%a = f() : g32[4]@cpu", 14, "unknown type 'g32': use one of int, float, bool, opaque, f64"),
        ("^a = f(flase)", 10, "unknown literal 'flase': use one of None, true"),
        ("^a = f(complex(1, 2, 3))", 17, "complex takes two numbers"),
        ("^a = f(-oo)", 11, "unexpected 'oo': expected a number"),
        ("^a = f(k = 1, %x)", 10, "an operand cannot follow an attribute"),
        ("^a = f(k = 1, k = 2)", 17, "'k' is given twice"),
        ("^a = f() !wirtes[0]", 13, "unknown effect 'wirtes': use one of reads, writes"),
        ("^a = f() !writes[0:0]", 21, "unexpected ':'"),
        ("^a = f() !sync !sync", 19, "'sync' is given twice"),
        ("^a = f() {k = 1, k = 2}", 20, "'k' is given twice"),
        ("^a = f() {k = [%x]}", 13, "annotation 'k' cannot hold"),
        ('^a = f() {region = "0"}', 13, "annotation 'region' must be int"),
        ('^a = f() {"flops" = 1}', 13, "an annotation cannot be called 'flops'"),
        ('^a = f() {code = "x"}', 3, 'a source line is written loc = "file:line"'),
        ("^a = f() {frames = [3]}", 23, "unexpected '3': expected a string"),
        ("^a = f() {loc = 3}", 19, "unexpected '3': expected a string"),
        ('^a = f("\\q")', 10, "this string has an unknown escape, or no end"),
        ('^a = f("\\UFFFFFFFF")', 10, "this string has an unknown escape, or no end"),
        ("^a = f($(1/0))", 14, "not an expression: division by zero"),
        ("^a = f($(2*(1/(s0 - s0) + 1)))", 17, "not an expression: division by zero"),
        ("^a = f($(s0 % (1 - 1)))", 17, "not an expression: division by zero"),
        ("^a = f($(s0 + Mod(s0, 0)))", 17, "not an expression: "),
        ("^a = f($(s0 + FloorDiv(s0, 0)))", 17, "not an expression: division by zero"),
        ("^a = f($(Max(0, ModularIndexing(s0, 0, 2))))", 19, "not an expression: division by zero"),
        ("^a = f($(0**-1))", 12, "not an expression: division by zero"),
        ("^a = f($(oo - oo))", 12, "not an expression: division by zero"),
        ("^a = f($(1 + Maxx(1, s0)))", 16, "unknown function 'Maxx': use one of Abs, Max, Min, Mod, "),
        ("^a = f() {launches = foo.bar(2)}", 24, "unknown function 'foo.bar': use one of "),
        ("%a = f() : f32[sqrt(s0)]@cpu", 18, "unknown function 'sqrt': use one of "),
        ("^a = f($(floor()))", 12, "not an expression: floor takes exactly 1 argument (0 given)"),
        ("^a = f($(9**9**9))", 12, "not an expression: this power takes too many digits"),
        ("^a = f($(" + "9" * 4000 + "*" + "9" * 4000 + "))", 12, "not an expression: a number takes too many digits"),
        ("^a = f($(1e999))", 12, "not an expression: a number takes too many digits"),
        ("^a = f(" + "9" * 5000 + ")", 4310, "unexpected '999"),
        ("^a = f(" + "[" * 101, 110, "this is nested more than 100 deep"),
        ("^a = f(\0)", 10, "unexpected character"),
    ],
)
def test_errors_point_at_the_place(line: str, column: int, reason: str) -> None:
    error = error_of(body(line))
    assert reason in error.reason
    assert (error.span.line, error.span.column) == (2, column)
    message, shown, carets = str(error).split("\n")
    assert message.startswith(f"file.pgir:2:{column}: {reason}")
    assert shown == "  " + line.replace("\0", "\u2400"), "no control character reaches a terminal"
    assert carets.startswith(" " * (column - 1) + "^")


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", (1, 1), "the text ends too early: expected 'graph'"),
        ("graph @g () {\n  return ()\n\n", (2, 12), "the text ends too early"),
        ("graph @g {stage = lfited} () { return () }", (1, 19), "unknown stage 'lfited': use one of lifted"),
        ("graph @g {kin = a} () { return () }", (1, 11), "unknown setting 'kin'"),
        ("graph @g {kind = a, kind = b} () { return () }", (1, 21), "'kind' is given twice"),
        ("graph @g {hints = {a = 1, a = 2}} () { return () }", (1, 27), "'a' is given twice"),
        ("graph @g (%x : int {rloe = input}) { return () }", (1, 21), "unexpected 'rloe': expected 'role"),
        ("graph @g (%x : int, %x : int) { return () }", (1, 21), "the name 'x' is taken"),
        ("graph @g () { return () } regions { 0 () 0 () }", (1, 42), "region 0 is given twice"),
        ("graph @g () { return () } regions { 0 {flops = 1} () }", (1, 40), "an annotation cannot be called 'flops'"),
        (
            "graph @g () { return () } subgraphs { graph @a () { return () } @a = graph @b () { return () } }",
            (1, 65),
            "'a' is given twice",
        ),
        ("graph @g () { return () } graph @h () { return () }", (1, 27), "unexpected 'graph'"),
    ],
)
def test_errors_outside_of_nodes(text: str, place: tuple[int, int], reason: str) -> None:
    error = error_of(text)
    assert reason in error.reason
    assert (error.span.line, error.span.column) == place


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
        "*".join(f"Mod(s{i}, 7)" for i in range(2000)),
        "floor(" * 90 + "a/7" + "+b)/3" * 90,
        "a" + "".join(f" % {name}" for name in CHOICES),
    ],
    ids=lambda size: size[:24],
)
def test_an_expression_that_would_take_sympy_long_is_refused_with_little_work(size: str) -> None:
    text = f"graph @main (\n  %x : f32[{size}]@cpu) {{\n  return (%x)\n}}\n"

    def refused() -> None:
        with pytest.raises(ParseError) as caught:
            parse_graph(text)
        assert caught.value.span.line == 2, "points at the place"

    work(refused, most=4_000_000)
