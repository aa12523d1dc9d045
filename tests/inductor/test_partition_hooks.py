"""What Inductor's program becomes under a decision: cuts, order, and the record held against what was decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import pygraph
from pygraph.inductor.compile import compare
from pygraph.inductor.decision import Decision, Placed
from pygraph.inductor.record import PatternNode, ProgramRecord, RecordedMaps, Step
from pygraph.ir import CAPTURABLE, REASON, Graph, Stage
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.report.model import GraphReport

pytestmark = pytest.mark.usefixtures("fresh")


@dataclass(frozen=True)
class Forbid(Pass):
    """Judges every node of one operator not capturable."""

    name: ClassVar[str] = "forbid"
    requires: ClassVar[Stage] = Stage.JUDGED
    ensures: ClassVar[Stage | None] = None

    op: str = ""

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        found = [node for node in graph.nodes if node.op == self.op]
        for node in found:
            node.meta.set(CAPTURABLE, False)
            node.meta.set(REASON, "forbidden")
        return PassResult(bool(found))


def compile_and_check(function: Callable[..., Any], *inputs: torch.Tensor, forbid: str = "") -> GraphReport:
    """Compile with one operator forbidden, hold results against eager, return the report."""
    passes = ["legality,placement", Forbid(forbid), "partitioning"]
    ours = torch.compile(function, backend="pygraph", options={"passes": passes})
    with torch.no_grad():
        for _ in range(4):
            fresh = [torch.randn_like(x) for x in inputs]
            torch.testing.assert_close(ours(*fresh), function(*fresh))
    (report,) = pygraph.reports()
    assert report.error is None
    return report


def held(report: GraphReport) -> set[str]:
    """The FX nodes inside emitted regions."""
    return {name for region in report.regions for name in region.nodes}


def test_a_forbidden_operator_is_outside_and_cuts_the_program_in_two() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w)
        values = torch.sort(y, dim=-1).values
        return torch.tanh(values @ w)

    report = compile_and_check(f, torch.randn(4, 4), torch.randn(4, 4), forbid="aten.sort.default")
    assert len(report.regions) == 2
    assert "sort" not in held(report)
    assert any("sort" in name for step in report.record.outside for name in step.origins)
    assert report.emitted is not None
    assert any("sort" in kernel for kernel in report.emitted.outside)


def test_a_forbidden_pointwise_operator_takes_its_fused_kernel_along() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.sin(x @ w) + 1) @ w

    report = compile_and_check(f, torch.randn(4, 4), torch.randn(4, 4), forbid="aten.sin.default")
    assert "sin" not in held(report)
    assert any("left outside: forbidden" in note for note in report.notes)
    assert len(report.regions) == 2


def test_independent_cuts_are_brought_together() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.sort(torch.relu(x @ w), dim=-1).values @ w
        b = torch.sort(torch.tanh(x @ w.t()), dim=-1).values @ w
        return a, b

    report = compile_and_check(f, torch.randn(4, 4), torch.randn(4, 4), forbid="aten.sort.default")
    assert len(report.regions) == 2
    assert [region.state for region in report.regions] == ["replay", "replay"]


def test_a_graph_without_any_capturable_launch_has_no_region() -> None:
    report = compile_and_check(lambda x: torch.sort(x, dim=-1).values, torch.randn(4, 4), forbid="aten.sort.default")
    assert report.regions == []
    assert report.coverage == 0.0


def decision(**reasons: str | None) -> Decision:
    nodes = {n: Placed(f"aten.{n}.default", None if r else 0, r, not r) for n, r in reasons.items()}
    return Decision("cpu", nodes, (0,), frozenset({0}), "legality")


def step(*origins: str, reason: str | None = None) -> Step:
    return Step(origins, origins, True, reason)


def test_a_region_with_an_uncapturable_operator_is_named_and_barred() -> None:
    record = ProgramRecord(((step("mm"), step("item")),), (True,))
    notes, forbidden = compare(decision(mm=None, item="host-read"), record)
    assert forbidden == {0}
    assert notes == ["region 0 holds item (aten.item.default), judged not capturable: host-read"]


def test_a_region_with_a_made_node_that_has_to_stay_outside_is_barred() -> None:
    made = PatternNode("addmm", "aten.addmm.default", ("mm",), "forbidden")
    record = ProgramRecord(((Step(("buf0",), ("addmm",), True, None, (made,)),),), (True,))
    notes, forbidden = compare(decision(mm="forbidden"), record)
    assert forbidden == {0}
    assert notes == ["region 0 holds addmm (aten.addmm.default), which has to stay outside: forbidden"]


def test_a_constant_that_was_folded_into_a_kernel_bars_nothing() -> None:
    nodes = {
        "held": Placed("pygraph.constant", None, "cpu-operator", False),
        "held_cuda": Placed("prims.device_put.default", 0, None, True),
        "mul": Placed("aten.mul.Tensor", 0, None, True),
    }
    record = ProgramRecord(((step("held", "held_cuda", "mul"),),), (True,))
    assert compare(Decision("cuda", nodes, (0,), frozenset({0}), "legality"), record) == ([], set())


def test_more_regions_than_decided_are_reported() -> None:
    record = ProgramRecord(
        ((step("mm"),), (step("x", reason="unsupported-device"),), (step("relu"),)), (True, False, True)
    )
    notes, forbidden = compare(decision(mm=None, relu=None), record)
    assert forbidden == set()
    assert notes == ["2 regions were emitted where 1 were decided"]


def test_a_program_as_decided_has_no_notes() -> None:
    record = ProgramRecord(((step("mm"),), (step("item", reason="host-read"),)), (True, False))
    assert compare(decision(mm=None, item="host-read"), record) == ([], set())


def test_the_record_survives_pickling() -> None:
    import pickle

    record = ProgramRecord(((step("mm"),),), (True,))
    again = pickle.loads(pickle.dumps(RecordedMaps(["map"], record)))
    assert list(again) == ["map"]
    assert again.record == record
