"""Sides: which there are where, and that an ablation compiles without its mechanism and is right all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pygraph
from pygraph.bench.correctness import difference, tensors_of
from pygraph.bench.sides import ABLATIONS, SIDES, compile_as, measures, sides_for, step_as

ALL = ("eager", "default", "reduce-overhead", "make-graphed-callables", "whole-step", "pygraph")


def test_all_sides_or_those_named_and_always_the_reference() -> None:
    assert sides_for([], "cuda", False) == ALL
    assert sides_for([], "cpu", False) == ("eager", "default", "pygraph")
    assert sides_for(["pygraph"], "cpu", False) == ("eager", "pygraph")
    assert sides_for(["pygraph", "pygraph-no-placement"], "cpu", False) == ("eager", "pygraph", "pygraph-no-placement")


def test_ablations_are_those_that_differ_from_pygraph_as_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_MEASURE", "0")
    found = sides_for([], "cpu", True)
    without = ("uncaptured", "no-placement", "no-reordering", "no-model")
    assert set(found) >= {f"pygraph-{name}" for name in without}
    assert "pygraph-no-measuring" not in found
    monkeypatch.setenv("PYGRAPH_MEASURE", "1")
    assert "pygraph-no-measuring" in sides_for([], "cpu", True)


@pytest.mark.parametrize(
    ("names", "why"),
    [(["reduce-overhed"], "did you mean 'reduce-overhead'"), (["xyz"], "there are eager"), (["whole-step"], "a GPU")],
)
def test_names_that_cannot_be(names: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sides_for(names, "cpu", False)


def test_only_pygraph_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_MEASURE", "1")
    expected = ["pygraph", *(name for name in ABLATIONS if name != "pygraph-no-measuring")]
    assert [name for name in SIDES if measures(name)] == expected
    monkeypatch.setenv("PYGRAPH_MEASURE", "0")
    assert not any(measures(name) for name in SIDES)


def test_steps_are_left_as_they_are_but_for_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> int:
        return 3

    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    assert step_as("pygraph", step) is step_as("default", step) is step
    assert step_as("reduce-overhead", step)() == 3
    assert marks == [1]


def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float, torch.Tensor]:
    a = x @ y
    seen = float(a.sum())
    b = torch.relu(x) @ y
    return a.sin(), seen, b.cos() * seen


def equal(found: object, expected: object) -> bool:
    """But for sums in another order."""
    return difference({1: list(tensors_of(expected))}, {1: list(tensors_of(found))}) < 1e-5


@pytest.fixture
def inputs(fresh: None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield torch.randn(16, 16), torch.randn(16, 16)


@pytest.mark.parametrize(("name", "regions"), [("pygraph", 2), ("pygraph-uncaptured", 0), ("pygraph-no-reordering", 2)])
def test_ablations_compile_and_equal_eager(name: str, regions: int, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    compiled = compile_as(name, program)
    for _ in range(3):
        assert equal(compiled(*inputs), program(*inputs))
    captured = [region for report in pygraph.reports() for region in report.regions if region.state == "replay"]
    assert len(captured) == regions
    assert not any(report.error for report in pygraph.reports())


@pytest.mark.parametrize("name", ["pygraph-no-placement", "pygraph-no-model"])
def test_pipelines_without_a_mechanism_run(name: str, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    compiled = compile_as(name, program)
    assert equal(compiled(*inputs), program(*inputs))
    (report,) = pygraph.reports()
    assert report.error is None
    left = {"pygraph-no-placement": "placement", "pygraph-no-model": "selection"}[name]
    assert left not in report.pipeline.split(",")
