"""What Inductor's program becomes under a decision: cuts, order, and the record held against what was decided."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.inductor.compile import compare
from pygraph.inductor.decision import Decision, Placed
from pygraph.inductor.emitted import PatternNode, ProgramRecord, RecordedMaps, Step
from pygraph.report.model import GraphReport

pytestmark = pytest.mark.usefixtures("fresh")


def compile_and_check(function: Callable[..., Any], *inputs: torch.Tensor, forbid: str = "") -> GraphReport:
    """Compile with one operator forbidden, hold results against eager, return the report."""
    passes = f"legality{{forbid=[{forbid}]}},placement,partitioning"
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
    assert (report.regions, report.coverage) == ([], 0.0)


def decision(**reasons: str | None) -> Decision:
    nodes = {n: Placed(f"aten.{n}.default", None if r else 0, r, not r) for n, r in reasons.items()}
    return Decision("cpu", nodes, (0,), frozenset({0}), "legality")


def step(*origins: str, reason: str | None = None) -> Step:
    return Step(origins, origins, True, reason)


MADE = PatternNode("addmm", "aten.addmm.default", ("mm",), "forbidden")
FOLDED = {
    "held": Placed("pygraph.constant", None, "cpu-operator", False),
    "held_cuda": Placed("prims.device_put.default", 0, None, True),
}


@pytest.mark.parametrize(
    ("record", "decided", "note"),
    [
        (
            ProgramRecord(((step("mm"), step("item")),), (True,)),
            decision(mm=None, item="host-read"),
            "region 0 holds item (aten.item.default), judged not capturable: host-read",
        ),
        (
            ProgramRecord(((Step(("buf0",), ("addmm",), True, None, (MADE,)),),), (True,)),
            decision(mm="forbidden"),
            "region 0 holds addmm (aten.addmm.default), which has to stay outside: forbidden",
        ),
        (
            ProgramRecord(((step("mm"),), (step("x", reason="other"),), (step("relu"),)), (True, False, True)),
            decision(mm=None, relu=None),
            "2 regions were emitted where 1 were decided",
        ),
        (
            ProgramRecord(((step("mm"),), (step("item", reason="host-read"),)), (True, False)),
            decision(mm=None, item="host-read"),
            "",
        ),
        # a constant that was folded into a kernel bars nothing
        (
            ProgramRecord(((step("held", "held_cuda"),),), (True,)),
            Decision("cuda", FOLDED, (0,), frozenset({0}), "legality"),
            "",
        ),
    ],
)
def test_a_region_that_holds_what_must_be_outside_is_barred_and_all_differences_are_noted(
    record: ProgramRecord, decided: Decision, note: str
) -> None:
    kept = pickle.loads(pickle.dumps(RecordedMaps(["map"], record)))  # as in Inductor's cache
    assert (list(kept), kept.record) == (["map"], record)
    notes, forbidden = compare(decided, kept.record)
    assert notes == ([note] if note else [])
    assert forbidden == ({0} if "region 0 holds" in note else set())
