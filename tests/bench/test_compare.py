"""Differences between results: relative to the largest magnitude, and infinite where nothing can be compared."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch

from pygraph.bench.compare import difference
from pygraph.bench.process import Spec
from pygraph.bench.worker import Serving

NAN, INF = float("nan"), float("inf")


def apart(reference: torch.Tensor, other: torch.Tensor) -> float | None:
    return difference({1: [reference]}, {1: [other]})


def test_differences_are_relative_to_the_largest_magnitude() -> None:
    reference = torch.tensor([1.0, -4.0, NAN, INF])
    assert apart(reference, reference.clone()) == 0.0
    assert apart(reference, torch.tensor([1.2, -4.0, NAN, INF])) == pytest.approx(0.05)
    assert apart(torch.zeros(2), torch.tensor([0.0, 0.25])) == 0.25
    assert difference({1: [torch.zeros(0), torch.ones(1)]}, {1: [torch.zeros(0), torch.ones(1)]}) == 0.0


@pytest.mark.parametrize("other", [[1, -4, 0, INF], [1, NAN, NAN, INF], [1, -4, NAN, -INF], [1, -4, NAN, 9], [1, 1]])
def test_what_cannot_be_compared_is_infinitely_far(other: list[float]) -> None:
    reference = torch.tensor([1.0, -4.0, NAN, INF])
    assert apart(reference, torch.tensor(other)) == math.inf
    assert apart(reference, reference.double()) == math.inf


def test_narrow_and_whole_numbers_are_widened() -> None:
    assert apart(torch.tensor([60000.0]).half(), torch.tensor([-60000.0]).half()) == 2.0
    assert apart(torch.tensor([2**60]), torch.tensor([2**60 + 2**30])) == pytest.approx(2.0**-30)
    assert apart(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0
    assert apart(torch.tensor([3 + 4j]), torch.tensor([3 + 0j])) == 1.0
    assert apart(torch.tensor([250], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)) == 1.0


def test_the_worst_tensor_of_the_worst_call_counts() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, 1.5])
    assert difference({1: [good, good], 7: [good]}, {1: [good, bad], 7: [good]}) == 0.5
    assert difference({1: [good], 7: [good]}, {1: [good]}) == math.inf
    assert difference({1: [good, good]}, {1: [good]}) == math.inf
    assert difference({1: [good]}, {1: [good], 2: [bad]}) == 0.0


@pytest.mark.parametrize("nothing", [{}, {1: [], 2: []}, {1: [torch.zeros(0, 3)]}], ids=["no call", "None", "empty"])
def test_equal_results_without_a_number_say_nothing(nothing: dict[int, list[torch.Tensor]]) -> None:
    assert difference(nothing, nothing) is None


def test_results_are_copies_and_come_back_from_a_file(tmp_path: Path) -> None:
    """A script that ends after its results were saved saves once more."""
    tensor, path = torch.ones(3, requires_grad=True), tmp_path / "deep" / "result.pt"
    serving = Serving(io.StringIO(), io.StringIO(), Spec("", "", (), "eager", "cpu", str(path)))
    serving.keep([tensor, (2, {"a": 3, "b": None}), "text"])
    with torch.no_grad():
        tensor += 1
    serving.save()
    serving.save()
    assert [each.tolist() for each in torch.load(path)[0]] == [[1.0, 1.0, 1.0], 2, 3]
    assert [file.name for file in path.parent.iterdir()] == ["result.pt"]
