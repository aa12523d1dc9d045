"""Operators that turn out to be impossible to capture only when it is tried: named, cut out, and captured around."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph import recompile
from tests import failing
from tests.failing import CALLS, check, compiled, in_place, inputs, one, only, place, shared, states, two, weight

pytestmark = pytest.mark.usefixtures("fresh")

# -- the refusal names operator and line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "op", "mark", "reason"),
    [
        (one, "quantized.pygraphfails_double.default", "the line of double", "capture-failed"),
        (in_place, "quantized.pygraphfails_add_into.default", "the line of add_into", "capture-failed"),
        (shared, "quantized.pygraphfails_spread.default", "the line of spread", "aliasing-operator"),
    ],
)
def test_the_refusal_names_operator_and_line(fn: Callable[..., Any], op: str, mark: str, reason: str) -> None:
    ours, w = compiled(fn), weight()
    for seed in range(2):
        check(ours, fn, inputs(seed=seed), w)
    (region,) = only().regions
    assert region.state == "uncaptured"
    refusal = region.record.refusals[reason]  # type: ignore[union-attr]
    assert refusal.launch == op
    assert refusal.loc is not None
    assert refusal.loc.endswith(place(mark))
    assert len(refusal.nodes) == 1
    assert op in region.why
    assert place(mark) in region.why


@pytest.mark.parametrize("fn", [one, in_place, shared])
def test_the_next_call_cuts_there_and_captures_the_rest(fn: Callable[..., Any], compilations: list[str]) -> None:
    ours, w = compiled(fn), weight()
    for seed in range(CALLS):
        check(ours, fn, inputs(seed=seed), w)
    report = only()
    assert compilations == [report.name]
    assert states(report) == ["replay", "replay"]
    assert all(region.record.replays >= 1 for region in report.regions)  # type: ignore[union-attr]
    assert [kernel for kernel in report.emitted.outside if "pygraphfails" in kernel] == list(report.emitted.outside)  # type: ignore[union-attr]
    (left,) = [u for u in report.uncaptured() if u.reason == "failed-capture"]
    assert "pygraphfails" in left.op or "pygraphfails" in str(report.graph)
    assert left.loc is not None
    assert Path(failing.__file__).name in left.loc
    assert any("compiled again, cut at" in note and Path(failing.__file__).name in note for note in report.notes)


def test_the_uncaptured_operator_runs_once_a_call() -> None:
    runs: list[int] = []

    @torch.library.custom_op("quantized::pygraphfails_counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x + 1

    counted.register_fake(failing.compiling_only)
    ours, w = compiled(lambda x, w: torch.relu(counted(torch.relu(x @ w)) @ w)), weight()
    with torch.no_grad():
        for seed in range(CALLS):
            ours(inputs(seed=seed), w)
            runs.clear()
        ours(inputs(), w)
    assert states(only()) == ["replay", "replay"]
    assert len(runs) == 1


def test_explain_names_the_operator_the_reason_and_the_line() -> None:
    with torch.no_grad():
        explanation = pygraph.explain(one, inputs(), weight())
    text = " ".join(str(explanation).split())
    assert "quantized.pygraphfails_double" in text
    assert "capture-failed" in text
    assert place("the line of double") in text


@torch.library.custom_op("pygraphfails::by_groups", mutates_args=())
def by_groups(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A product for each group of rows, as mixtures of experts have: the host reads where they end."""
    out, start = torch.zeros_like(x), 0
    for i, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], w[i], out=out[start:end])
        start = end
    return out


@by_groups.register_fake
def _(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """More layers than a graph is compiled again for, each with an operator that cannot be captured."""
    for _ in range(recompile.LIMIT + 2):
        ends = (x > 0).sum(0)[:1].clamp(max=len(x))
        x = torch.relu(by_groups(torch.relu(x @ w), w.unsqueeze(0), ends) @ w)
    return x


def test_an_operator_that_fails_in_each_layer_is_cut_in_all_at_once(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tried on the host too, as on a GPU.
    monkeypatch.setattr("pygraph.passes.legality.rules.is_custom", lambda op: False)
    ours, w = compiled(experts), weight()
    for seed in range(CALLS):
        check(ours, experts, inputs(seed=seed), w)
    report = only()
    assert len(compilations) == 1
    assert set(states(report)) == {"replay"}
    assert len(report.regions) == recompile.LIMIT + 3
    assert report.emitted is not None
    assert set(report.emitted.outside) == {"pygraphfails.by_groups.default"}


# -- training, sizes, several operators --------------------------------------------------------------------------------


def test_training_is_cut_in_forward_and_backward(compilations: list[str]) -> None:
    ours, w, plain = compiled(one), weight(True), weight(True)
    for seed in range(CALLS + 2):
        x = inputs(seed=seed)
        w.grad = plain.grad = None
        ours(x, w).square().mean().backward()
        one(x, plain).square().mean().backward()
        torch.testing.assert_close(w.grad, plain.grad)
    forward, backward = pygraph.reports()
    assert sorted(compilations) == sorted([forward.name, backward.name])
    assert states(forward) == ["replay"] * 2
    assert set(states(backward)) == {"replay"}
    assert len(backward.regions) == 2
    assert "double_backward" in next(u.op for u in backward.uncaptured())


def test_dynamic_sizes_are_compiled_again(compilations: list[str]) -> None:
    ours, w = compiled(one, dynamic=True), weight()
    for rows in (8, 8, 8, 8, 12, 12, 12, 5, 5, 5):
        check(ours, one, inputs(rows), w)
    report = only()
    assert compilations == [report.name]
    assert states(report) == ["replay", "replay"]
    assert {region.record.captures for region in report.regions} == {3}  # type: ignore[union-attr]


def test_dynamic_training(compilations: list[str]) -> None:
    ours, w, plain = compiled(one, dynamic=True), weight(True), weight(True)
    for rows in (8, 8, 8, 8, 8, 12, 12, 12):
        w.grad = plain.grad = None
        ours(inputs(rows), w).square().mean().backward()
        one(inputs(rows), plain).square().mean().backward()
        torch.testing.assert_close(w.grad, plain.grad)
    assert len(compilations) == 2
    assert {state for report in pygraph.reports() for state in states(report)} == {"replay"}


def test_two_operators_fail_one_after_the_other(compilations: list[str]) -> None:
    ours, w = compiled(two), weight()
    for seed in range(2 * CALLS):
        check(ours, two, inputs(seed=seed), w)
    report = only()
    assert len(compilations) == 2
    assert states(report) == ["replay"] * 3
    left = [u for u in report.uncaptured() if u.reason == "failed-capture"]
    assert [u.op for u in left] == ["quantized.pygraphfails_double.default", "quantized.pygraphfails_triple.default"]
    assert sum("compiled again, cut at" in note for note in report.notes) == 2
