"""Whatever pipeline runs on whatever graph: the meaning stays, contracts hold, and a second run changes nothing."""

from __future__ import annotations

from hypothesis import given, note, settings
from hypothesis import strategies as st

from pygraph.ir import H200, HOST, Effects, Graph, Stage, parse_graph
from pygraph.ir.interp import interpret
from pygraph.passes import DEFAULT_PIPELINE, Pass, PassContext, PassManager
from pygraph.passes.legality import Legality
from pygraph.passes.partitioning import Partitioning
from pygraph.testing.strategies import KINDS, Kind, operator_graphs

MINE = Kind("mylib.scale_.default", operands=2, effects=Effects(writes=(1,), aliases=((0, 1),)))
GRAPHS = operator_graphs(max_nodes=12, kinds=(*KINDS, MINE))
CONTEXTS = st.sampled_from([PassContext("cpu", HOST), PassContext("cuda", H200)])
FORBIDDEN = ["aten.relu", "aten.add", "aten.view", "aten.split", "aten.relu_", "aten.var_mean"]


@st.composite
def pipelines(draw: st.DrawFn) -> list[Pass | str]:
    """The default pipeline or a part of it, with options, passes repeated here and there."""
    forbid = tuple(draw(st.lists(st.sampled_from(FORBIDDEN), max_size=2, unique=True)))
    partitioning = Partitioning(draw(st.none() | st.integers(0, 3)))
    whole: list[Pass | str] = [Legality(forbid), "placement", partitioning, "indirection", "selection"]
    length = draw(st.integers(1, len(whole)))
    again = draw(st.integers(0, length))
    return [*whole[:length], *whole[again:length]]


def run(graph: Graph, pipeline: list[Pass | str] | str, ctx: PassContext) -> Graph:
    """A copy after ``pipeline``; the input is printed when a property fails, as ``pygraph opt`` takes it."""
    manager = PassManager(pipeline, check="full")
    note(f"// pipeline: {manager.text}\n// device: {ctx.device}\n{graph}")
    copy = graph.clone()
    manager.run(copy, ctx)
    return copy


@settings(max_examples=80)
@given(GRAPHS, pipelines(), CONTEXTS)
def test_the_meaning_is_unchanged_and_the_result_has_text(
    graph: Graph, pipeline: list[Pass | str], ctx: PassContext
) -> None:
    done = run(graph, pipeline, ctx)
    assert interpret(done) == interpret(graph)
    assert parse_graph(str(done)) == done


@settings(max_examples=40)
@given(GRAPHS, CONTEXTS)
def test_a_second_run_changes_nothing(graph: Graph, ctx: PassContext) -> None:
    once = run(graph, DEFAULT_PIPELINE, ctx)
    assert str(run(once, DEFAULT_PIPELINE, ctx)) == str(once)


@settings(max_examples=40)
@given(GRAPHS, st.integers(0, 5), CONTEXTS)
def test_a_run_cut_short_and_taken_up_again_is_a_run(graph: Graph, limit: int, ctx: PassContext) -> None:
    manager = PassManager(DEFAULT_PIPELINE, bisect_limit=limit)
    resumed = graph.clone()
    skipped = manager.run(resumed, ctx).skipped
    PassManager(list(skipped)).run(resumed, ctx)
    assert resumed == run(graph, DEFAULT_PIPELINE, ctx)
    assert resumed.stage is Stage.SELECTED
