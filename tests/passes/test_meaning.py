"""Passes are held to the meaning of a graph: run before and after, on random inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph.frontend.meaning  # noqa: F401 - runs graphs
from pygraph.errors import PassError
from pygraph.ir import Graph, KernelNode, parse_graph
from pygraph.passes import Found, Pass, PassManager, as_pass, rewrite

T = "f32[s0, 4]@cuda:0"
TEXT = f"""graph @main {{hints = {{s0 = 8}}}} (%x : {T}, %y : {T}, %k : int(s0)) {{
  %a = aten.relu.default(%x) : {T} {{loc = "net.py:3"}}
  %b = aten.mul.Tensor(%a, %y) : {T} {{loc = "net.py:4"}}
  %r = aten.rand_like.default(%x) : {T} !reads[] !rng("cuda:0")
  %q = aten.rand_like.default(%b) : {T} !reads[] !rng("cuda:0")
  %s = aten.bernoulli.p(%x, 0.5) : {T} !rng("cpu")
  %w = aten.add_.Tensor(%y, %r) : {T} !writes[0] !aliases[0:0]
  %v = aten.view.default(%b, [$(4*s0)]) : f32[4*s0]@cuda:0 !reads[] !aliases[0:0]
  %n = aten.full.default([$(s0 + 1)], 2.0, device = @cuda:0) : f32[s0 + 1]@cuda:0
  return (%v, %r, %q, %n, %k)
}}"""


def run(change: Callable[[Graph], Any], text: str = TEXT, *, keeps_meaning: bool = True) -> tuple[str, ...]:
    """The notes of a pass that makes a change."""

    def changed(graph: Graph, ctx: object) -> bool:
        del ctx
        change(graph)
        return True

    made = as_pass(changed)
    item: Pass = type(made.__name__, (made,), {"keeps_meaning": keeps_meaning})()
    (record,) = PassManager([item], check="full").run(parse_graph(text)).passes
    return record.notes


def clamped(graph: Graph) -> None:
    rewrite(graph, "aten.relu.default(%x)", lambda at: at.add("aten.clamp_min.default", (at["x"], 0)))


def rounded(graph: Graph) -> None:
    """a * y as a / 3 * (y * 3), which rounds otherwise."""

    def thirds(at: Found) -> KernelNode:
        third, triple = at.add("aten.div.Tensor", (at["a"], 3)), at.add("aten.mul.Scalar", (at["y"], 3))
        return at.add("prims.mul.default", (third.output, triple.output))

    rewrite(graph, "aten.mul.Tensor(%a, %y)", thirds)


def reordered(*names: str) -> Callable[[Graph], None]:
    return lambda graph: graph.reorder(map(graph.node, names))


def negated(graph: Graph) -> None:
    rewrite(graph, "aten.relu.default(%x)", lambda at: at.add("aten.neg.default", (at["x"],)))


def baked(graph: Graph) -> None:
    """The size of the example, in the place of a symbol."""
    graph.set_args(graph.node("n"), ((9,), 2.0))


def swapped(graph: Graph) -> None:
    graph.set_outputs((*graph.outputs[:1], graph.outputs[2], graph.outputs[1], *graph.outputs[3:]))


@pytest.mark.parametrize(
    "change",
    [clamped, rounded, reordered("s", "n", "a", "b", "r", "q", "w", "v"), lambda graph: graph.erase(graph.node("s"))],
    ids=["another operator", "another rounding", "another order", "nothing that counts"],
)
def test_a_pass_that_keeps_the_meaning_passes(change: Callable[[Graph], Any]) -> None:
    assert run(change) == ()


@pytest.mark.parametrize(
    ("change", "node", "reason"),
    [
        (negated, "b", "(s0 = 3), output 0 differs: by up to"),
        (reordered("a", "b", "q", "r", "s", "w", "v", "n"), "q", "output 1 differs"),
        (reordered("a", "r", "w", "b", "q", "s", "v", "n"), "b", "output 0 differs"),
        (lambda graph: graph.erase(graph.node("w")), None, "input %y at the end differs"),
        (swapped, None, "output 1 differs"),
        (lambda graph: graph.set_args(graph.node("n"), ((-1,), 2.0)), None, "it fails where the graph before did not"),
        (baked, "n", "output 3 differs: float32 [4] on cpu before, float32 [9] on cpu after; first at n = aten.full"),
    ],
)
def test_a_pass_that_does_not_is_told_the_first_node_that_differs(
    change: Callable[[Graph], Any], node: str | None, reason: str
) -> None:
    with pytest.raises(PassError) as failed:
        run(change)
    assert failed.value.node == node
    assert "it changed what the graph computes: on random inputs" in failed.value.reason
    assert reason in failed.value.reason
    assert run(change, keeps_meaning=False) == ()


def test_results_that_vary_anyway_are_nobodys_fault() -> None:
    calls = itertools.count()
    with torch.library._scoped_library("varying", "DEF") as library:
        library.define("count(Tensor x) -> Tensor")
        library.impl("count", lambda x: x + next(calls), "CompositeExplicitAutograd")
        lines = "%r = varying.count.default(%x) : f32[4]@cpu  %z = aten.clone.default(%x) : f32[4]@cpu"
        text = f"graph @main (%x : f32[4]@cpu) {{ {lines}  return (%r) }}"
        (note,) = run(lambda graph: graph.erase(graph.node("z")), text)
    assert note == "its meaning was not checked: its results vary from run to run"


def test_moves_keep_every_bit() -> None:
    big = "f32[64, 64]@cpu"
    line = f"aten.add_.Tensor(%x, %{{}}) : {big} !writes[0] !aliases[0:0]"
    inputs = f"%x : {big}, %y : {big}, %z : {big}"
    text = f"graph @main ({inputs}) {{ %a = {line.format('y')}  %b = {line.format('z')}  return () }}"
    with pytest.raises(PassError, match="input %x at the end differs: by up to") as failed:
        run(reordered("b", "a"), text)
    assert failed.value.node == "b"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("%r = aten.relu.default(%x) : f32[9000, 9000]@cpu", "its values take more than 64 MB"),
        (
            '%r = _c10d_functional.all_reduce.default(%x, "sum", "0") : f32[4]@cpu !collective("0")',
            "communicates with other",
        ),
        ("%r = mylib.op.default(%x) : f32[4]@cpu !barrier", "nothing is known of what mylib.op.default does"),
        ("%r = mylib.op.default(%x) : f32[4]@cpu", "this torch has no operator 'mylib.op.default'"),
        ("%r = aten.mm.default(%x, %x) : f32[4]@cpu", "RuntimeError"),
    ],
)
def test_what_cannot_be_run_is_said(body: str, reason: str) -> None:
    inputs = "%x : f32[9000, 9000]@cpu" if "9000" in body else "%x : f32[4]@cpu"
    body += f"  %z = aten.clone.default(%x) : {inputs[5:]}  return (%r)"
    text = f"graph @main {{operators = [mylib.op.default]}} ({inputs}) {{ {body} }}"
    (note,) = run(lambda graph: graph.erase(graph.node("z")), text)
    assert note.startswith("its meaning was not checked: ")
    assert reason in note


def test_single_elements_may_have_any_stride() -> None:
    text = """graph @main (%x : f32[2, 3]@cuda:0) {
  %a = aten.relu.default(%x) : f32[2, 3]@cuda:0
  %b = aten.select.int(%a, 1, 2) : f32[2]@cuda:0 !reads[] !aliases[0:0]
  %c = aten.slice.Tensor(%b, 0, 1, 2) : f32[1]@cuda:0 !reads[] !aliases[0:0]
  return (%c)
}"""
    assert run(clamped, text) == ()
    with pytest.raises(PassError, match="differ"):
        run(negated, text)
