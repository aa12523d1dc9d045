"""The stated error, and calibrations as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraph.calibration.records import DEVICE, HOST_CALL, Calibration, error_of
from tests.calibration.samples import calibration, point


def test_errors_are_factors_whichever_way_they_go() -> None:
    over, under = error_of([point(20.0, 10.0)]), error_of([point(10.0, 20.0)])
    assert over == under
    assert over is not None
    assert (over.median, over.tenth, over.count) == (pytest.approx(2.0), pytest.approx(2.0), 1)
    assert point(10.0, 20.0).off == pytest.approx(2.0)


def test_median_and_ninetieth_percentile() -> None:
    error = error_of([point(10.0 * 2.0**power, 10.0) for power in range(11)])
    assert error is not None
    assert error.median == pytest.approx(2.0**5)
    assert error.tenth == pytest.approx(2.0**9)
    between = error_of([point(10.0, 10.0), point(40.0, 10.0)])
    assert between is not None
    assert between.median == pytest.approx(2.0)
    assert between.tenth == pytest.approx(math.exp(0.9 * math.log(4.0)))


def test_the_error_in_words() -> None:
    error = error_of([point(13.0, 10.0), point(10.0, 10.0), point(10.0, 21.0)])
    assert error is not None
    assert error.text == "within a factor of 1.30 for half of them, 1.91 for nine in ten (3 predictions)"


def test_nothing_has_no_error() -> None:
    assert error_of([]) is None


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), min_size=1, max_size=30))
def test_errors_are_ordered_and_at_least_one(pairs: list[tuple[float, float]]) -> None:
    error = error_of([point(*pair) for pair in pairs])
    assert error is not None
    assert 1.0 <= error.median <= error.tenth <= max(point(*pair).off for pair in pairs) * (1 + 1e-9)


def test_json_round_trip_with_errors() -> None:
    made = calibration()
    data = json.loads(json.dumps(made.as_json()))
    assert Calibration.from_json(data) == made
    assert set(data["errors"]) == {DEVICE, HOST_CALL}
    assert data["errors"][HOST_CALL]["count"] == 2


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"identity": None},
        {"identity": {"kind": "cpu"}},
        {"figures": [{"name": "x"}]},
        {"points": [{**vars_of, "measured_us": 0.0} for vars_of in [calibration().as_json()["points"][0]]]},
        {"model": {}},
        {"sweeps": 3},
    ],
    ids=str,
)
def test_json_that_is_no_calibration(change: dict[str, Any]) -> None:
    data = json.loads(json.dumps({**calibration().as_json(), **change}))
    with pytest.raises(ValueError, match=r"not a|format"):
        Calibration.from_json(data)


def test_each_kind_of_call_has_to_be_predicted() -> None:
    """An uncaptured launch that takes nothing is four points of ten: no median of all would show it."""
    good = [point(5.0, 4.0, HOST_CALL, "replay") for _ in range(6)]
    bad = [point(1e-3, 50.0, HOST_CALL, "uncaptured") for _ in range(4)]
    made = dataclasses.replace(calibration(), points=(*good, *bad))
    assert made.unfit() == "host time per call (uncaptured) is off by more than a factor of 3 for half of them"
    assert dataclasses.replace(calibration(), points=tuple(good)).unfit() is None


def test_a_model_whose_figures_are_not_those_that_were_measured_is_damaged() -> None:
    data = json.loads(json.dumps(calibration().as_json()))
    for wrong in (0.0, 3e9):
        data["model"]["launch_us"] = wrong
        with pytest.raises(ValueError, match="launch_us of the model is not what was measured"):
            Calibration.from_json(data)


def test_a_number_that_no_float_holds_is_damage() -> None:
    data = {**calibration().as_json(), "seconds": 10**400}
    with pytest.raises(ValueError, match="not a calibration"):
        Calibration.from_json(data)
