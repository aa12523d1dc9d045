"""Medians, intervals and ratios: what holds for all samples, and figures worked out by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.bench.statistics import geometric_mean, median_interval, ratio_within_rounds, spread

times = st.floats(min_value=1e-3, max_value=1e6)
samples = st.lists(times, min_size=1, max_size=40)


@settings(deadline=None, max_examples=100)
@given(samples)
def test_a_median_lies_between_its_quartiles_and_within_its_interval(found: list[float]) -> None:
    told = spread(found)
    low, high, confidence = median_interval(found)
    assert told.low <= told.median <= told.high
    assert low <= statistics.median(found) <= high
    assert 0.0 <= confidence <= 1.0
    assert {low, high} <= set(found)
    assert (confidence >= 0.95) == (len(found) >= 6)


@settings(deadline=None, max_examples=50)
@given(samples, st.randoms(use_true_random=False))
def test_order_does_not_matter(found: list[float], shuffler: random.Random) -> None:
    other = found[:]
    shuffler.shuffle(other)
    assert median_interval(other) == median_interval(found)
    assert spread(other) == spread(found)


def test_intervals_are_those_of_the_binomial_distribution() -> None:
    """The ranks that tables give for the median at 95 %."""
    for count, ranks, confidence in (
        (6, (1, 6), 0.96875),
        (9, (2, 8), 0.9609375),
        (11, (2, 10), 0.98828125),
        (20, (6, 15), 0.9586105),
    ):
        low, high, found = median_interval([float(rank) for rank in range(1, count + 1)])
        assert (low, high) == ranks
        assert found == pytest.approx(confidence, abs=1e-6)
    assert median_interval([3.0]) == (3.0, 3.0, 0.0)
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (1.0, 5.0, 0.9375)


def test_an_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(2000):
        low, high, _ = median_interval([draw.lognormvariate(0.0, 1.0) for _ in range(9)])
        covered += low <= 1.0 <= high
    assert 0.945 <= covered / 2000 <= 0.98


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(times, times), min_size=1, max_size=20), st.floats(min_value=0.1, max_value=10))
def test_a_drift_of_whole_rounds_changes_no_ratio(rounds: list[tuple[float, float]], factor: float) -> None:
    above, below = [a for a, _ in rounds], [b for _, b in rounds]
    drift = [factor**number for number in range(len(rounds))]
    once = ratio_within_rounds(above, below)
    drifted = ratio_within_rounds(
        [a * d for a, d in zip(above, drift, strict=True)], [b * d for b, d in zip(below, drift, strict=True)]
    )
    assert drifted.median == pytest.approx(once.median, rel=1e-9)
    assert once.low <= once.median <= once.high
    assert once.rounds == len(rounds)


@settings(deadline=None, max_examples=50)
@given(samples.filter(lambda found: len(found) % 2 == 1))
def test_ratios_the_other_way_round_are_inverse(above: list[float]) -> None:
    below = above[::-1]
    there, back = ratio_within_rounds(above, below), ratio_within_rounds(below, above)
    assert there.median == pytest.approx(1 / back.median)
    assert there.low == pytest.approx(1 / back.high)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        spread([])
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])
    with pytest.raises(ValueError, match="2 rounds of one side, 1 of the other"):
        ratio_within_rounds([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="not positive"):
        ratio_within_rounds([1.0, 0.0], [1.0, 1.0])


def test_geometric_means() -> None:
    assert geometric_mean([]) is None
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert not math.isnan(geometric_mean([1e-300] * 100) or math.nan)
