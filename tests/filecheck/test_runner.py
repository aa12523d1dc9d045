"""The runner itself: each directive holds where it should and fails where it should."""

from __future__ import annotations

import pytest

from pygraph.testing import CheckFailure, check_text

GRAPH = """
graph @g (%x : f32[4]@cpu) {
  %a = aten.relu.default(%x) : f32[4]@cpu
  %b = aten.neg.default(%a) : f32[4]@cpu
  return (%b)
}
"""


def check(*directives: str, graph: str = GRAPH) -> None:
    check_text("\n".join([f"// {directive}" for directive in directives]) + graph)


TYPO = GRAPH.replace("(%x) :", "(%y) :")


@pytest.mark.parametrize(
    ("directives", "graph"),
    [
        (("CHECK: aten.relu", "CHECK: aten.neg", "CHECK: return (%b)"), GRAPH),
        (("CHECK: aten.relu", "CHECK-NEXT: aten.neg"), GRAPH),
        (("CHECK: aten.relu", "CHECK-NOT: aten.add", "CHECK: return"), GRAPH),
        (("CHECK-NOT: aten.neg", "CHECK: aten.relu"), GRAPH),
        (("CHECK: %{{[a-z]}}   =  aten.relu.default(%x)",), GRAPH),
        (("CHECK-ERROR: unknown value %y",), TYPO),
    ],
)
def test_what_holds(directives: tuple[str, ...], graph: str) -> None:
    check("RUN:", *directives, graph=graph)


@pytest.mark.parametrize(
    ("directives", "graph", "reason"),
    [
        (("CHECK: aten.neg", "CHECK: aten.relu"), GRAPH, "not found after line"),
        (("CHECK: aten.relu", "CHECK-NEXT: return"), GRAPH, "on the next line"),
        (("CHECK: return", "CHECK-NEXT: }", "CHECK-NEXT: }"), GRAPH, "on the next line"),
        (("CHECK: aten.relu", "CHECK-NOT: aten.neg", "CHECK: return"), GRAPH, "must not be"),
        (("CHECK: aten.relu", "CHECK-NOT: return"), GRAPH, "must not be"),
        (("CHECK: %{{[0-9]}} = aten.relu",), GRAPH, "not found"),
        (("CHECK: a.en",), GRAPH, "not found"),
        (("CHECK-ERROR: unknown value %z",), TYPO, "something else"),
        (("CHECK-ERROR: unknown",), GRAPH, "no error"),
        (("CHECK: return",), "graph", "ParseError"),
    ],
)
def test_what_fails(directives: tuple[str, ...], graph: str, reason: str) -> None:
    with pytest.raises(CheckFailure, match=reason):
        check("RUN:", *directives, graph=graph)


def test_a_pipeline_runs_and_is_verified() -> None:
    check("RUN: legality", "CHECK: stage = judged", "CHECK: aten.relu.default(%x) {{.*}}capturable = true")
    check("RUN: no-such-pass", "CHECK-ERROR: no-such-pass")


def test_cases_are_split_and_inherit_the_pipeline() -> None:
    text = f"// RUN: legality\n// DEVICE: cuda\n// CHECK: return{GRAPH}// -----\n// CHECK: judged{GRAPH}"
    check_text(text)
    with pytest.raises(CheckFailure, match="line 10"):
        check_text(text.replace("// CHECK: judged", "// CHECK: placed"))


@pytest.mark.parametrize(
    "directives",
    [("CHECK: return",), ("RUN:",), ("RUN:", "CHECK-SOON: x"), ("RUN:", "CHECK:"), ("RUN:", "CHECK-NEXT: return")],
)
def test_a_file_that_is_no_test_fails(directives: tuple[str, ...]) -> None:
    with pytest.raises(CheckFailure, match=r"line [12]:"):
        check(*directives)
