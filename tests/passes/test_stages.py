"""Stages: what a pass that is run again sets back, and which annotations go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pygraph.ir import CAPTURABLE, REASON, REGION, SELECTED, Graph, Stage
from pygraph.passes import PassContext, PassResult
from pygraph.passes.indirection import Indirection
from pygraph.passes.selection import Selection
from tests.passes.build import build
from tests.passes.sample_passes import PIPELINE, Idle, Rewriting, run, sample


def test_parameters_go_with_their_stage_even_if_the_pass_keeps_the_regions() -> None:
    @dataclass(frozen=True)
    class Recheck(Idle):
        name: ClassVar[str] = "recheck"
        requires: ClassVar[Stage] = Stage.PARTITIONED
        ensures: ClassVar[Stage | None] = Stage.PARTITIONED

    graph, expected = sample(), sample()
    run([PIPELINE, Recheck()], graph, check="full")
    run("partitioning", expected)
    assert graph == expected


def test_selection_run_again_keeps_what_came_before_it() -> None:
    graph = sample()
    run(PIPELINE, graph)
    before = str(graph)
    run([Selection()], graph, check="full")
    assert str(graph) == before
    run([Indirection()], graph)
    assert graph.stage is Stage.INDIRECTED
    assert all(region.parameters and SELECTED not in region.meta for region in graph.regions.values())


def test_going_back_to_the_start_drops_every_judgement() -> None:
    graph = build("a: launch x", "u: host a", "v: view u", "w1: host v", "b: launch w1")
    run(PIPELINE, graph)
    run([Rewriting()], graph, check="full")
    assert graph.stage is Stage.LIFTED
    assert not graph.regions
    assert all(key not in node.meta for node in graph.nodes for key in (CAPTURABLE, REASON, REGION))


def test_going_back_before_partitioning_keeps_the_reasons_of_legality_alone() -> None:
    @dataclass(frozen=True)
    class Again(Idle):
        name: ClassVar[str] = "again"
        ensures: ClassVar[Stage | None] = Stage.PLACED

    graph = build("a: launch x", "u: host a", "v: view u", "w1: host v", "b: launch w1")
    untouched = str(graph)
    run([PIPELINE, Again()], graph, check="full")
    assert str(graph) == untouched


def test_a_pass_sees_what_it_requires_even_if_it_ensures_less() -> None:
    seen: list[int] = []

    @dataclass(frozen=True)
    class Dissolving(Idle):
        name: ClassVar[str] = "dissolving"
        requires: ClassVar[Stage] = Stage.PARTITIONED
        ensures: ClassVar[Stage | None] = Stage.PLACED

        def run(self, graph: Graph, ctx: PassContext) -> PassResult:
            seen.append(len(graph.regions))
            return PassResult(False)

    graph = sample()
    run([PIPELINE, Dissolving()], graph)
    assert seen == [2]
    assert (graph.stage, dict(graph.regions)) == (Stage.PLACED, {})
