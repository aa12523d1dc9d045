"""What a capture costs, measured on the host driver with a few sizes: kinds of calls, parts, ratios."""

from __future__ import annotations

import pytest
import torch

import pygraph
from benchmarks import capture_cost

pytestmark = pytest.mark.usefixtures("fresh")


def test_calls_are_told_apart_and_their_parts_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cost, "DEVICE", "cpu")
    sizes = (16, 32, 48, 64)
    found = capture_cost.cost_of(capture_cost.perceptron, sizes)
    medians = found["medians"]
    calls = {kind: row["calls"] for kind, row in medians.items()}
    assert "refused" not in calls
    # The call that compiles comes before those that are timed, so that the first size is captured one call earlier.
    captured = calls.get("captured", 0) + calls.get("captured twice", 0)
    assert (calls["uncaptured"], captured, calls["replayed"]) == (2 * 4 - 1, 4, 2 * 4 + 1)
    for kind in ("captured", "captured twice"):
        if kind in medians:
            row = medians[kind]
            parts = row["capture_us"] + row["instantiate_us"] + row["comparison_us"]
            assert 0 < parts < 4 * row["wall_us"]
            assert found["ratios"][f"wall_us {kind}"] == pytest.approx(
                row["wall_us"] / medians["uncaptured"]["wall_us"], abs=2e-3
            )
            assert 0 < found["ratios"][f"comparison of {kind}"] < 1
    assert "comparison_us" not in medians["uncaptured"]
    assert len(pygraph.reports()) == 1


def test_a_meter_counts_calls_that_raise() -> None:
    meter = capture_cost.Meter()
    with pytest.raises(RuntimeError):
        meter.timed("part", torch.empty(2).view)(3)
    assert meter.calls == {"part": 1}
    meter.empty()
    assert meter.calls == {}
