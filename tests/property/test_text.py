"""Text: every graph prints to text that parses back to an equal graph; every other text is a ParseError or a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import ParseError
from pygraph.ir import Graph, canonical, parse_graph
from pygraph.ir.dims import dim_text
from pygraph.ir.types import Dim
from tests.strategies import dims, structure, text_graphs

SEED = Path(__file__).parents[1].joinpath("ir", "sample.pgir").read_text(encoding="utf-8")
PIECES = [*'(){}[]"\\', *"\n!-=,:%\0\ud800é", "%x", "^n7", "@cpu", "#t", "//", "**", "/0", "9" * 40, "e9", "s0", "oo"]
PIECES += ["$(", "f32[", "after(", "None", "floor("]


@settings(max_examples=10)
@given(text_graphs())
def test_print_parse_round_trip(graph: Graph) -> None:
    text = str(graph)
    for again in (parse_graph(text), graph.clone()):
        assert structure(again) == structure(graph)
        assert str(again) == text


@settings(max_examples=80)
@given(dims)
def test_expressions_round_trip(value: Dim) -> None:
    text = f"graph @g () {{ %x = f() : int({dim_text(value)}) return () }}"
    assert parse_graph(text).nodes[0].output.type.expr == value
    assert canonical(value) == value


def parses_or_says_why(text: str) -> None:
    try:
        graph = parse_graph(text)
    except ParseError as error:
        problem = error
    else:
        assert parse_graph(str(graph)) == graph
        return
    lines = text.split("\n")
    assert problem.reason
    assert 1 <= problem.span.line <= len(lines)
    assert 1 <= problem.span.column <= len(lines[problem.span.line - 1]) + 1


@settings(max_examples=80)
@given(st.data())
def test_mutated_text_is_a_graph_or_a_parse_error(data: st.DataObject) -> None:
    text = SEED
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 30)))
        piece = data.draw(st.sampled_from(PIECES) | st.text(max_size=3) | st.just(""))
        text = text[:start] + piece + text[end:]
    parses_or_says_why(text)


@settings(max_examples=50)
@given(
    st.integers(0, SEED.index("} regions")).map(lambda length: SEED[:length])
    | st.text(st.characters(), max_size=40)
    | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
)
def test_truncated_and_random_text_is_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError):
        parse_graph(text)


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from([*PIECES, "+", "*", "/", "1", "2.5", "u0", "Mod(", "a", "1e308", "FloorDiv("]), max_size=9)
)
def test_random_expressions_are_expressions_or_parse_errors(pieces: list[str]) -> None:
    parses_or_says_why(f"graph @g () {{ %x = f($({' '.join(pieces)})) : int return () }}")


@settings(max_examples=30)
@given(st.sampled_from(["(", "[", "$(", "f(", "-", "2**", "floor(", "{"]), st.integers(50, 3000), st.booleans())
def test_deep_nesting_never_exhausts_the_stack(opener: str, count: int, closed: bool) -> None:
    closer = {"[": "]", "{": "}"}.get(opener[-1], ")" if opener.endswith("(") else "")
    inner = opener * count + "x" + (closer * count if closed else "")
    for text in (f"$({inner})", inner):
        parses_or_says_why(f"graph @g () {{ %x = f({text}) : int return () }}")
