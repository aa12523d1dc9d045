"""Student's quantiles, differences of pairs, options."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import OptionError
from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.statistics import difference, lower_median, mild_median, spread, t_quantile


@pytest.mark.parametrize(
    ("alpha", "freedom", "expected"),
    [
        (0.025, 1, 12.7062),
        (0.025, 2, 4.3027),
        (0.001, 1, 318.309),
        (0.001, 4, 7.1732),
        (0.0005, 3, 12.9240),
        (0.001, 5, 5.8934),
        (0.005, 11, 3.1058),
        (0.025, 10, 2.2281),
        (0.0005, 30, 3.6460),
    ],
)
def test_quantiles_are_those_of_the_tables(alpha: float, freedom: int, expected: float) -> None:
    assert t_quantile(alpha, freedom) == pytest.approx(expected, rel=1e-4)


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-5, 0.4), st.integers(1, 60))
def test_quantiles_fall_with_freedom_and_with_alpha(alpha: float, freedom: int) -> None:
    assert t_quantile(alpha, freedom) > t_quantile(alpha, freedom + 1) > 0
    assert t_quantile(alpha, freedom) > t_quantile(alpha * 1.1, freedom)


def test_bounds_hold_as_often_as_they_say() -> None:
    random = Random(1)
    outside = 0
    for _ in range(2000):
        weights = [random.choice([4, 16, 64]) for _ in range(6)]
        values = [0.1 + random.gauss(0, 0.07 / math.sqrt(weight)) for weight in weights]
        outside += difference(values, weights, [0.0] * 6, 0.07).least(0.01) > 0.1
    assert outside <= 2 * 0.01 * 2000


def test_a_stray_value_among_many_is_left_out_and_among_few_says_nothing() -> None:
    values = [0.03, 0.031, 0.029, 0.9, 0.032, 0.03]
    found = difference(values, [16] * 6, [0.0] * 6, 0.05)
    assert found.mean == pytest.approx(0.0304, abs=1e-6)
    assert found.least(0.001) < 0.03 < found.most(0.001)
    few = difference([0.03, 0.9], [16] * 2, [0.0] * 2, 0.05)
    assert few.least(0.01) < -1
    assert few.most(0.01) > 1


def test_long_blocks_weigh_more_and_their_doubt_widens_the_bounds() -> None:
    sure = difference([0.0, 0.1], [1, 9], [0.0, 0.0], 0.2)
    doubted = difference([0.0, 0.1], [1, 9], [0.1, 0.0], 0.2)
    assert sure.mean == pytest.approx(0.09)
    assert doubted.allowance == pytest.approx(0.01)
    assert doubted.least(0.01) == pytest.approx(sure.least(0.01) - 0.01)
    assert doubted.most(0.01) == pytest.approx(sure.most(0.01) + 0.01)


def test_medians() -> None:
    assert lower_median([4, 1, 3, 2]) == 2
    assert mild_median([1.02, 9.0]) == 1.02
    assert mild_median([0.2, 0.99, 5.0, 0.1]) == 0.99
    assert mild_median([3.0]) == 3.0
    assert spread([1, 2, 3, 4, 100]) == pytest.approx(1.4826)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fraction": 0.0},
        {"alpha": 0.6},
        {"looks": ()},
        {"looks": (4, 2)},
        {"looks": (1, 2)},
        {"period": 1},
        {"drift": 1},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        SelectionOptions(**wrong)  # type: ignore[arg-type]
