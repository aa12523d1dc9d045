"""Regions that a user's pass draws are the partitions of the compiled program, or the report says which node is not
where it was decided. ``tests/property/test_cut_programs.py`` draws them at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch._inductor import config
from torch._inductor.scheduler import Scheduler

import pygraph
from pygraph.inductor.decision import decide
from pygraph.ir import REASON, REGION, SELECTED, Graph, Region, Stage
from pygraph.passes import Pass, PassContext, PassManager, PassResult
from pygraph.report.model import GraphReport

pytestmark = pytest.mark.usefixtures("fresh")

LEGAL = "legality,placement"
DEFAULT = "legality,placement,partitioning,indirection,selection"


@dataclass(frozen=True)
class Draw(Pass):
    """Gives operators, by the order of the program, the regions of a text: ``"001-"`` has two, the last is outside.
    Views go with what they are views of."""

    name: ClassVar[str] = "draw"
    requires: ClassVar[Stage] = Stage.PLACED
    ensures: ClassVar[Stage] = Stage.PARTITIONED

    regions: str = ""
    unselected: str = ""

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        letters = iter(self.regions)
        for node in graph.nodes:
            sources = [value.producer for value in node.inputs if value.producer is not None]
            region = next((source.meta.get(REGION) for source in sources), None)
            if node.cost.launches != 0:
                letter = next(letters)
                region = None if letter == "-" else int(letter)
            if region is None:
                node.meta.set(REASON, "left-out" if node.cost.launches != 0 else "no-launch")
                continue
            node.meta.set(REGION, region)
            graph.regions.setdefault(region, Region()).meta.set(SELECTED, str(region) not in self.unselected)
        assert not list(letters)
        return PassResult(True)


def compiled(function: Callable[..., Any], *inputs: torch.Tensor, passes: Sequence[Any], **options: Any) -> GraphReport:
    """The report of ``function`` compiled under ``passes``, once its results have been held against eager."""
    ours = torch.compile(function, backend="pygraph", options={"passes": passes, "ledger": False, **options})
    with torch.no_grad():
        for _ in range(4):
            fresh = [torch.randn_like(x) for x in inputs]
            copies = [x.clone() for x in fresh]
            torch.testing.assert_close(ours(*fresh), function(*copies))
    (report,) = pygraph.reports()
    assert report.error is None
    return report


def drawn(function: Callable[..., Any], *inputs: torch.Tensor, draw: Draw, **options: Any) -> GraphReport:
    return compiled(function, *inputs, passes=[LEGAL, draw], **options)


def partitions(report: GraphReport) -> Mapping[int, set[str]]:
    """The operators of each partition, by the region that it is."""
    names = {node.name for node in report.graph.nodes if node.cost.launches != 0}
    return {region.planned[0]: names.intersection(region.nodes) for region in report.regions}


def square() -> torch.Tensor:
    return torch.empty(8, 8)


def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm, relu, mm_1, tanh, mm_2, sin."""
    return ((x @ w).relu() @ w).tanh().mm(w).sin()


def test_a_boundary_is_kept() -> None:
    report = drawn(products, square(), square(), draw=Draw("000111"))
    assert partitions(report) == {0: {"mm", "relu", "mm_1"}, 1: {"tanh", "mm_2", "sin"}}
    assert [region.state for region in report.regions] == ["replay", "replay"]
    assert report.record.differences == ()


def test_nothing_is_fused_across_a_boundary() -> None:
    """Inductor puts off what is computed element by element, and computes it in what reads it."""
    chain = lambda x: x.sin().cos().tanh().exp()  # noqa: E731
    assert len(drawn(chain, square(), draw=Draw("0000")).regions[0].kernels) == 1
    pygraph.reset()
    report = drawn(chain, square(), draw=Draw("0012"))
    assert partitions(report) == {0: {"sin", "cos"}, 1: {"tanh"}, 2: {"exp"}}


def test_independent_kernels_of_two_regions_are_not_fused() -> None:
    siblings = lambda x: (x.sin(), x.cos())  # noqa: E731
    assert [region.kernels for region in drawn(siblings, square(), draw=Draw("00")).regions] == [
        ("cpp_fused_cos_sin_0",)
    ]
    pygraph.reset()
    assert partitions(drawn(siblings, square(), draw=Draw("01"))) == {0: {"sin"}, 1: {"cos"}}


def test_no_pattern_takes_nodes_of_two_regions() -> None:
    f = lambda x, w, b: (x @ w) + b  # noqa: E731
    inputs = (square(), square(), torch.empty(8))
    assert drawn(f, *inputs, draw=Draw("00")).regions[0].kernels == ("extern_kernels.addmm",)
    pygraph.reset()
    report = drawn(f, *inputs, draw=Draw("01"))
    assert [region.kernels[0] for region in report.regions] == ["extern_kernels.mm", "cpp_fused_add_0"]


def test_regions_that_are_far_apart_become_one() -> None:
    """Their nodes are put together, although the program has others in between."""
    report = drawn(lambda x, w: (x.mm(w).sin(), w.mm(w).cos(), w.mm(x).exp()), square(), square(), draw=Draw("001100"))
    assert partitions(report) == {0: {"mm", "sin", "mm_2", "exp"}, 1: {"mm_1", "cos"}}


def test_a_region_that_is_not_selected_is_not_wrapped() -> None:
    report = drawn(products, square(), square(), draw=Draw("001122", unselected="1"))
    assert [(region.planned, region.wrapped, region.state) for region in report.regions] == [
        ((0,), True, "replay"),
        ((1,), False, "uncaptured"),
        ((2,), True, "replay"),
    ]


def test_a_pass_that_only_selects_is_obeyed() -> None:
    """Of regions that partitioning drew around an operator that cannot be captured."""

    def select_last(graph: Graph, ctx: PassContext) -> bool:
        for index, region in graph.regions.items():
            region.meta.set(SELECTED, index == max(graph.regions))
        return True

    report = compiled(
        lambda x, w: (x.mm(w).relu().sort().values.mm(w), w.mm(w).relu()),
        *(square(), square()),
        passes=["legality{forbid=[aten.sort.default]}", "placement,partitioning,indirection,selection", select_last],
    )
    assert [(region.planned, region.wrapped) for region in report.regions] == [((0,), False), ((1,), True)]


def test_what_is_left_outside_is_not_fused_with_a_region() -> None:
    report = drawn(lambda x: x.sin().cos().tanh(), square(), draw=Draw("0-1"))
    assert partitions(report) == {0: {"sin"}, 1: {"tanh"}}
    assert [step.origins for step in report.record.outside] == [("cos",)]


def test_what_is_left_outside_between_two_regions_is_still_fused() -> None:
    report = drawn(lambda x: x.sin().cos().tanh().exp(), square(), draw=Draw("0--1"))
    assert [step.origins for step in report.record.outside] == [("cos", "tanh")]


def test_a_region_may_begin_and_end_with_a_call() -> None:
    with torch.library._scoped_library("pygraph_drawn", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("twice", torch.empty_like, "Meta")
        twice = torch.ops.pygraph_drawn.twice
        forbid = "legality{forbid=[pygraph_drawn.twice.default]},placement"
        report = compiled(lambda x: twice(twice(x).sin()), square(), passes=[forbid, Draw("000")])
        (region,) = report.regions
        assert len(region.nodes) == 3
        assert region.state == "replay"


def test_the_report_names_a_node_that_inductor_makes_of_two_regions_and_strict_raises() -> None:
    """A write into a view of an input, and the copy back, become one write in place."""

    def f(x: torch.Tensor) -> torch.Tensor:  # sin, cos, slice_scatter, exp, copy_
        y = x.sin()
        x[:2] = y[:2].cos()
        return y.exp()

    draw = Draw("00102")
    report = drawn(f, square(), draw=draw)
    (difference,) = report.record.differences
    assert difference in report.notes
    assert difference.startswith(
        "slice_scatter (aten.slice_scatter.default) was decided for region 1, and runs in region 2"
    )
    torch._dynamo.reset()
    with pytest.raises(Exception, match="the program is not cut as was decided"):
        drawn(f, square(), draw=draw, strict=True)


def test_the_report_says_that_a_program_on_several_streams_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(products, square(), square(), draw=Draw("000111"))  # installs the hooks
    hooked = Scheduler.process_grouped_nodes
    torch._dynamo.reset()
    pygraph.reset()

    def with_several_streams(scheduler: Any) -> None:
        monkeypatch.setattr(scheduler, "_multi_stream_nodes", True, raising=False)  # 2.11 has none
        hooked(scheduler)
        scheduler._multi_stream_nodes = False

    monkeypatch.setattr(Scheduler, "process_grouped_nodes", with_several_streams)
    with config.patch(fx_graph_cache=False):
        report = drawn(products, square(), square(), draw=Draw("000111"))
    assert len(report.regions) == 1
    assert "several streams" in report.record.differences[0]


def test_regions_that_no_pass_of_the_users_draws_may_be_joined() -> None:
    graph = pygraph.ir.parse_graph(
        "graph @g (%x : f32[4]@cpu) {\n  %a = aten.sin.default(%x) : f32[4]@cpu {launches = 1}\n  return (%a)\n}\n"
    )
    drawing = PassManager([LEGAL, Draw("0")])
    assert not PassManager(DEFAULT).run(graph.clone()).user_regions
    assert drawing.run(graph).user_regions
    loose, exact = (decide(graph, "cpu", drawing.text, exact=exact) for exact in (False, True))
    assert loose.digest() != exact.digest()


def test_a_program_from_inductors_cache_has_the_same_partitions() -> None:
    with config.patch(fx_graph_cache=True):
        first = partitions(drawn(products, square(), square(), draw=Draw("011222")))
        torch._dynamo.reset()
        pygraph.reset()
        assert partitions(drawn(products, square(), square(), draw=Draw("011222"))) == first
        torch._dynamo.reset()
        pygraph.reset()
        assert len(partitions(drawn(products, square(), square(), draw=Draw("000222")))) == 2
