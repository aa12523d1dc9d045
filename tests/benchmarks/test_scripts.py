"""The single measurements run, and measure what they say."""

from __future__ import annotations

import pytest

import pygraph
from benchmarks import capture_cost, warm_start

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("fresh")]


def test_what_a_capture_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cost, "DEVICE", "cpu")
    found = capture_cost.cost_of(capture_cost.perceptron, (16, 32, 48, 64))
    medians = found["medians"]
    calls = {kind: row["calls"] for kind, row in medians.items()}
    # The call that compiles comes before those that are timed, so that the first size is captured one call earlier.
    captured = calls.get("captured", 0) + calls.get("captured twice", 0)
    assert (calls["uncaptured"], captured, calls["replayed"]) == (2 * 4 - 1, 4, 2 * 4 + 1)
    for row in (medians[kind] for kind in ("captured", "captured twice") if kind in medians):
        assert 0 < row["capture_us"] + row["instantiate_us"] + row["comparison_us"] < 4 * row["wall_us"]
    assert len(pygraph.reports()) == 1


def test_a_later_process_restores_everything_and_replays() -> None:
    row = warm_start.measure("mlp", "cpu", 1)
    assert row["misses"] == 0
    assert row["replay"] > row["pygraph warm"] > 0


@pytest.mark.parametrize("name", warm_start.PROGRAMS)
def test_programs_run(name: str) -> None:
    warm_start.program(name, "cpu")(lambda fn: fn)()
