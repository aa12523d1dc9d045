"""Fits recover what synthetic timings were made with, exactly without noise and closely with it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.calibration.fitting import Memory, fit_line, fit_memory, fit_peak, quartiles
from pygraph.ir import Peak

SIZES = [2.0 * (1 << power) for power in (8, 10, 12, 14, 16, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28)]
SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
FLOPS = [2.0 * side**3 for side in SIDES]
rates = st.floats(100.0, 10_000.0)


@settings(deadline=None, max_examples=100)
@given(base=st.floats(0.0, 50.0), slope=st.floats(0.001, 10.0))
def test_a_line_is_recovered(base: float, slope: float) -> None:
    line = fit_line((4, 16, 64), [base + slope * count for count in (4, 16, 64)])
    assert line.slope == pytest.approx(slope)
    assert line.base == pytest.approx(base, abs=1e-6)


def test_one_bad_point_does_not_move_a_line() -> None:
    counts = (2, 4, 8, 16, 32, 64)
    times = [3.0 + 0.5 * count for count in counts]
    times[3] *= 20
    line = fit_line(counts, times)
    assert line.slope == pytest.approx(0.5)
    assert line.base == pytest.approx(3.0)


def test_a_falling_line_has_no_slope() -> None:
    line = fit_line((4, 16, 64), (5.0, 4.9, 4.8))
    assert line.slope == 0.0
    assert line.base == pytest.approx(4.9)


@settings(deadline=None, max_examples=100)
@given(floor=st.floats(0.5, 5.0), rate=rates)
def test_one_rate_of_memory_is_recovered(floor: float, rate: float) -> None:
    truth = Memory(floor, 0.0, 0.0, rate)
    fit = fit_memory(SIZES, [truth.time_us(size) for size in SIZES])
    assert fit.kernel_us == pytest.approx(floor, rel=0.02)
    assert fit.bandwidth_gbs == pytest.approx(rate, rel=0.02)
    assert all(fit.time_us(size) == pytest.approx(truth.time_us(size), rel=0.03) for size in SIZES)


@settings(deadline=None, max_examples=100)
@given(floor=st.floats(0.5, 2.0), rate=rates, faster=st.floats(2.0, 5.0), split=st.integers(9, 12), seed=st.integers())
def test_a_cache_is_recovered_under_noise(floor: float, rate: float, faster: float, split: int, seed: int) -> None:
    truth = Memory(floor, SIZES[split], rate * faster, rate)
    noise = random.Random(seed)
    fit = fit_memory(SIZES, [truth.time_us(size) * noise.uniform(0.98, 1.02) for size in SIZES])
    assert fit.kernel_us == pytest.approx(floor, rel=0.1)
    assert fit.bandwidth_gbs == pytest.approx(rate, rel=0.1)
    seen = truth.time_us(SIZES[split]) > 3 * floor  # below, the floor hides the traffic of the cache
    assert not seen or (fit.cache_bytes, fit.cache_gbs) == (SIZES[split], pytest.approx(rate * faster, rel=0.15))


def test_times_that_do_not_grow_fit_no_rate() -> None:
    with pytest.raises(ValueError, match="no size takes longer"):
        fit_memory(SIZES, [1.0] * len(SIZES))


@settings(deadline=None, max_examples=100)
@given(
    gflops=st.floats(1e4, 1e6),
    ramp=st.sampled_from([0.0, 1e6, 3e8, 1e10]),
    floor=st.floats(0.5, 5.0),
    more=st.sampled_from([0.0, 0.5, 4.0]),
)
def test_a_peak_and_its_ramp_are_recovered(gflops: float, ramp: float, floor: float, more: float) -> None:
    """``more``: what products take beyond other kernels."""
    truth = Peak("f16", gflops, ramp, more)
    fit = fit_peak("f16", FLOPS, [floor + truth.time_us(flops) for flops in FLOPS], floor)
    assert fit.gflops == pytest.approx(gflops, rel=0.05)
    for flops in FLOPS:
        assert floor + fit.time_us(flops) == pytest.approx(floor + truth.time_us(flops), rel=0.05)


H200_BF16_US = (2.19, 2.35, 2.28, 2.63, 2.89, 3.48, 5.4, 22.61, 159.16, 1236.08)
"""Products of two square matrices of 16 to 8,192, measured on an H200, whose smallest kernel takes 1.11 µs."""


def test_small_products_on_a_gpu_do_not_pass_for_a_slow_rate() -> None:
    """They take twice as long as the smallest kernel, whatever they compute; the chip's own limit is 989 TFLOP/s."""
    flops = [2.0 * (16 * 2.0**i) ** 3 for i in range(len(H200_BF16_US))]
    fit = fit_peak("bf16", flops, H200_BF16_US, 1.11)
    assert fit.floor_us == pytest.approx(2.19 - 1.11)
    assert 850e3 < fit.gflops < 989e3
    for work, measured in zip(flops, H200_BF16_US, strict=True):
        assert 1.11 + fit.time_us(work) == pytest.approx(measured, rel=0.2)


def test_a_rate_is_hardly_above_the_best_that_was_seen() -> None:
    """A ramp that no size has left behind does not tell where it ends."""
    truth = Peak("f32", 1e6, 1e15)
    times = [1.0 + truth.time_us(flops) for flops in FLOPS]
    best = max(flops / truth.time_us(flops) for flops in FLOPS) / 1e3
    assert best < fit_peak("f32", FLOPS, times, 1.0).gflops <= 1.1 * best < 0.2e6


def test_a_ramp_halves_the_rate_of_as_much_work() -> None:
    peak = Peak("f32", 1000.0, 1e9)
    assert 1e9 / peak.time_us(1e9) / 1e3 == pytest.approx(500.0)
    assert peak.time_us(0.0) == 0.0
    assert Peak("f32", 1000.0, 1e9, 2.5).time_us(1e9) == pytest.approx(2.5 + peak.time_us(1e9))
    assert Peak("f32", 1000.0, 1e9, 2.5).time_us(0.0) == 0.0


def test_quartiles_of_one_value_and_of_several() -> None:
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)
    assert quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == (2.0, 3.0, 4.0)
