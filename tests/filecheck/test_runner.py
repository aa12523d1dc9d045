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


def test_checks_match_in_order() -> None:
    check("RUN:", "CHECK: aten.relu", "CHECK: aten.neg", "CHECK: return (%b)")
    with pytest.raises(CheckFailure, match="not found after line"):
        check("RUN:", "CHECK: aten.neg", "CHECK: aten.relu")


def test_next_is_the_next_line() -> None:
    check("RUN:", "CHECK: aten.relu", "CHECK-NEXT: aten.neg")
    with pytest.raises(CheckFailure, match="on the next line"):
        check("RUN:", "CHECK: aten.relu", "CHECK-NEXT: return")


def test_not_holds_up_to_the_next_match() -> None:
    check("RUN:", "CHECK: aten.relu", "CHECK-NOT: aten.add", "CHECK: return")
    check("RUN:", "CHECK-NOT: aten.neg", "CHECK: aten.relu")
    with pytest.raises(CheckFailure, match="must not be"):
        check("RUN:", "CHECK: aten.relu", "CHECK-NOT: aten.neg", "CHECK: return")
    with pytest.raises(CheckFailure, match="must not be"):
        check("RUN:", "CHECK: aten.relu", "CHECK-NOT: return")


def test_patterns_and_blanks() -> None:
    check("RUN:", "CHECK: %{{[a-z]}}   =  aten.relu.default(%x)")
    with pytest.raises(CheckFailure):
        check("RUN:", "CHECK: %{{[0-9]}} = aten.relu")
    with pytest.raises(CheckFailure):
        check("RUN:", "CHECK: a.en")


def test_errors() -> None:
    check("RUN:", "CHECK-ERROR: unknown value %y", graph=GRAPH.replace("(%x) :", "(%y) :"))
    with pytest.raises(CheckFailure, match="something else"):
        check("RUN:", "CHECK-ERROR: unknown value %z", graph=GRAPH.replace("(%x) :", "(%y) :"))
    with pytest.raises(CheckFailure, match="no error"):
        check("RUN:", "CHECK-ERROR: unknown")
    with pytest.raises(CheckFailure, match="ParseError"):
        check("RUN:", "CHECK: return", graph="graph")


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
