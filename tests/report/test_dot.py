"""Graphviz text: balanced, every node once, any name safely quoted."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.ir import Graph, Location, dependences
from pygraph.report.dot import quote, report_dot, to_dot
from tests.report.samples import EVIL, MATRIX, cut_graph, failed_report, full_report
from tests.strategies import names, operator_graphs

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|->|[\[\]{};=,]|[A-Za-z_][A-Za-z0-9_]*|-?[0-9.]+')


def tokens(text: str) -> list[str]:
    """The DOT tokens of ``text``; fails on anything that is none."""
    found, at = [], 0
    for match in TOKEN.finditer(text):
        assert not text[at : match.start()].strip(), f"no token: {text[at : match.start()]!r}"
        found.append(match[0])
        at = match.end()
    assert not text[at:].strip()
    return found


def check_syntax(text: str) -> list[str]:
    """Tokens of one balanced digraph."""
    found = tokens(text)
    assert found[0] == "digraph"
    depth = 0
    for i, token in enumerate(found):
        depth += (token == "{") - (token == "}")
        assert depth > 0 or i < 2 or i == len(found) - 1
    assert depth == 0
    return found


def test_each_region_is_a_cluster_with_its_nodes() -> None:
    text = to_dot(cut_graph())
    check_syntax(text)
    first, second = re.findall(r'subgraph "cluster_region_\d+" \{(.*?)\n  \}', text, re.DOTALL)
    assert ['"n:mm" [' in first, '"n:relu" [' in first, '"n:add" [' in first] == [True, True, False]
    assert '"n:add" [' in second
    outside = text.replace(first, "").replace(second, "")
    assert '"n:item" [' in outside
    assert '"n:neg" [' in outside


def test_edges_are_data_or_dashed_order() -> None:
    graph = cut_graph()
    graph.add_order(graph.node("mm"), graph.node("view"))
    text = to_dot(graph)
    assert '"n:mm" -> "n:relu";' in text
    assert '"in:x" -> "n:mm";' in text
    assert '"n:mm" -> "n:view" [style=dashed, constraint=false];' in text
    assert "in:w" not in text, "parameters are not drawn"


def test_what_is_not_capturable_is_red_and_says_why() -> None:
    (line,) = (line for line in to_dot(cut_graph()).splitlines() if line.strip().startswith('"n:item" ['))
    assert r"host-read: the host reads a device value" in line
    assert 'color="#d00000"' in line
    assert "model.py:12" in line


def test_names_are_escaped() -> None:
    graph = Graph('a "quoted" name')
    x = graph.add_input(MATRIX, 'x"];evil')
    graph.set_outputs(graph.add("op\\N", (x,), (MATRIX,), name='n"->"m\n').outputs)
    text = to_dot(graph)
    found = check_syntax(text)
    assert '"a \\"quoted\\" name"' in found
    assert '"n:n\\"->\\"m<a>"' in found
    assert r"op\\N" in text


def test_quoting_keeps_lines_and_drops_control_characters() -> None:
    assert quote('a"b\\c\nd') == r'"a\"b\\c\nd"'
    assert "\x1b" not in quote(EVIL)


def test_a_report_is_drawn_as_it_was_emitted() -> None:
    report = full_report()
    report.regions[1].nodes = ("view",)
    report.regions[1].planned = ()
    text = report_dot(report)
    assert check_syntax(text)[1] == '"graph0_inference"'
    assert '"n:add" [' not in "".join(re.findall(r'subgraph "cluster_region_1" \{(.*?)\n  \}', text, re.DOTALL))
    assert report_dot(failed_report()) == ""


@given(st.lists(names, min_size=1, max_size=6, unique=True))
@settings(deadline=None, max_examples=100)
def test_every_node_is_drawn_once_whatever_its_name(chosen: list[str]) -> None:
    graph = Graph(chosen[0])
    value = graph.add_input(MATRIX, "x" + "".join(chosen))
    for name in chosen:
        value = graph.add(name, (value,), (MATRIX,), name=name, loc=Location(name, 1, name, name)).output
    graph.set_outputs((value,))
    found = check_syntax(to_dot(graph))
    drawn = [a for a, b in pairwise(found) if b == "[" and a.startswith('"n:')]
    assert len(drawn) == len(set(drawn)) == len(graph)


@given(operator_graphs())
@settings(deadline=None, max_examples=40)
def test_every_dependence_is_an_edge(graph: Graph) -> None:
    text = to_dot(graph)
    check_syntax(text)
    assert text.count('" -> "n:') == len(dependences(graph)) + sum(len(value.users) for value in graph.inputs)
