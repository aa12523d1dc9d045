"""How far results lie apart, and what that allows a replay."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.tolerance import (
    FACTOR,
    TOLERANCE,
    Gap,
    Spread,
    Unlike,
    allowance,
    beyond,
    gap,
    repeats,
    unrepeated,
    widened,
)

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [
        ([1.0, -100.0], [1.5, -100.0], Gap(0.5, 100.0)),
        ([1.0, 1.0], [1.0, 1.0], Gap(0.0, 1.0)),
        ([math.nan, math.inf, 1.0], [math.nan, math.inf, 3.0], Gap(2.0, 1.0)),
        ([math.inf, 1.0], [-math.inf, 1.0], "has a NaN or an infinity at another place"),
        ([math.inf, 1.0], [math.nan, 1.0], "has a NaN or an infinity at another place"),
        ([math.nan, 1.0], [1.0, 1.0], "has a NaN or an infinity at another place"),
        ([math.nan], [math.nan], Gap(0.0, 0.0)),
        ([-0.0], [0.0], Gap(0.0, 0.0)),
        ([], [], Gap(0.0, 0.0)),
        ([1.0], [1.0, 1.0], "has another shape or dtype"),
    ],
)
def test_gap(reference: list[float], other: list[float], expected: Gap | str) -> None:
    assert gap(torch.tensor(reference), torch.tensor(other)) == expected


def test_gap_is_for_numbers_that_have_distances() -> None:
    assert gap(torch.tensor([3]), torch.tensor([3])) == Gap(0.0, 0.0)
    assert gap(torch.tensor([3]), torch.tensor([4])) == "holds other integers"
    assert gap(torch.tensor([True]), torch.tensor([False])) == "holds other integers"
    assert gap(torch.tensor([3]), torch.tensor([3.0])) == "has another shape or dtype"
    assert gap(torch.tensor([3 + 4j]), torch.tensor([0j])) == Gap(5.0, 5.0)
    assert gap(*(torch.tensor(v).to(torch.float8_e4m3fn) for v in ([1.0, 2.0], [2.0, 2.0]))) == Gap(1.0, 2.0)


def test_gap_reads_elements_in_order_whatever_the_strides_and_goes_past_one_chunk() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert gap(matrix, matrix.t().contiguous().t()) == Gap(0.0, 5.0)
    long = torch.zeros((1 << 22) + 3)
    other = long.clone()
    other[-1] = 7
    assert gap(long, other) == Gap(7.0, 0.0)
    assert gap(other, long) == Gap(7.0, 7.0)


def test_half_precision_is_compared_exactly() -> None:
    a = torch.tensor([57344.0, 1.0], dtype=torch.float16)
    assert gap(a, -a) == Gap(114688.0, 57344.0)


def test_a_spread_is_the_largest_difference_as_a_part_of_the_magnitude() -> None:
    reference = [torch.tensor([4.0, 2.0]), 7, torch.tensor([5])]
    spread: Spread = (None, None, None)
    for value, expected in ((2.0, None), (3.0, 0.25), (2.5, 0.25), (0.0, 0.5)):
        other = [torch.tensor([4.0, value]), 7, torch.tensor([5])]
        wider = widened(spread, reference, other, [value == 2.0, True, True])
        assert not isinstance(wider, Unlike)
        spread = wider
        assert spread == (expected, None, None)
    assert not repeats(spread)
    assert repeats((None, None))


def test_uncaptured_runs_that_differ_in_integers_have_no_spread() -> None:
    found = widened((None, None), [torch.ones(1), torch.tensor([1])], [torch.ones(1), torch.tensor([2])], [True, False])
    assert found == Unlike(1, "holds other integers")


def test_what_uncaptured_runs_repeat_a_replay_repeats() -> None:
    assert unrepeated((0.5, None), [False, True]) is None
    found = unrepeated((0.5, None, None), [False, True, False])
    assert found is not None
    assert found.index == 2
    assert beyond((None,), [torch.ones(1)], [torch.ones(1) + EPS], [False]) is not None


@settings(deadline=None, max_examples=200)
@given(
    st.floats(1e-3, 1e3),
    st.floats(0, 0.5),
    st.floats(0, 3),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 7),
)
def test_the_bound(scale: float, part: float, times: float, dtype: torch.dtype, at: int) -> None:
    reference = torch.linspace(-1, 1, 8, dtype=dtype) * scale
    largest = float(reference.abs().max())
    bound = largest * max(TOLERANCE * torch.finfo(dtype).eps, FACTOR * part)
    other = reference.clone()
    other[at] += times * bound
    distance = abs(float(other[at].double() - reference[at].double()))
    found = beyond((part,), [reference], [other], [False])
    assert (found is None) == (distance <= bound)
    if found is not None:
        assert found.how.startswith(f"is off by {distance:.2e}, allowed are {bound:.2e} (uncaptured runs are ")


@pytest.mark.parametrize(
    ("dtype", "part"),
    [
        (torch.float64, 64 * 2.0**-52),
        (torch.complex64, 64 * 2.0**-23),
        (torch.float16, 64 * 2.0**-10),
        (torch.bfloat16, 2.0**-4),
        (torch.float8_e4m3fn, 2.0**-3),
        (torch.float8_e5m2, 2.0**-2),
    ],
)
def test_what_is_allowed_in_any_case_is_a_small_part_in_coarse_types_too(dtype: torch.dtype, part: float) -> None:
    assert allowance(dtype) == part


def test_bits_that_are_equal_are_never_beyond() -> None:
    nan = torch.tensor([math.nan])
    assert beyond((0.0,), [nan], [nan], [True]) is None


def test_a_reference_of_zeros_allows_nothing_but_zeros() -> None:
    zeros = torch.zeros(3)
    assert widened((None,), [zeros], [torch.ones(3)], [False]) == (0.0,)
    assert beyond((0.0,), [zeros], [-zeros], [False]) is None
    assert beyond((0.0,), [zeros], [torch.ones(3)], [False]) is not None
