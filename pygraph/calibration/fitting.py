"""From times to figures: lines, rates of memory and of arithmetic. Pure arithmetic, without clocks or torch.

The laws that are fitted are those of ``pygraph.ir.cost.DeviceModel``; errors are of logarithms: every size counts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pygraph.ir import Peak

__all__ = ["Line", "Memory", "fit_line", "fit_memory", "fit_peak", "quartiles"]

_ABOVE = 1.05
"""A fitted rate is at most so many times the best that a product was seen to have, without the floor."""

_FLOORS = 10
"""Parts of what the fastest product takes that are tried as the floor."""

_LEAST_US = 1e-6
"""Times below this are noise of the clock: a fitted time is never less."""


@dataclass(frozen=True, slots=True)
class Line:
    """``base + slope · n``, µs."""

    base: float
    slope: float


def fit_line(counts: Sequence[float], times_us: Sequence[float]) -> Line:
    """The line with the median of all pairs' slopes (Theil and Sen), so that one bad point does not move it.

    Neither part is negative: where noise says so, it is 0.
    """
    pairs = itertools.combinations(zip(counts, times_us, strict=True), 2)
    slopes = [(t2 - t1) / (n2 - n1) for (n1, t1), (n2, t2) in pairs if n1 != n2]
    slope = max(0.0, statistics.median(slopes))
    base = statistics.median(t - slope * n for n, t in zip(counts, times_us, strict=True))
    return Line(max(0.0, base), slope)


@dataclass(frozen=True, slots=True)
class Memory:
    """A floor in µs, and the rate of traffic, GB/s, up to ``cache_bytes`` and beyond (``cache_gbs`` 0: the same)."""

    kernel_us: float
    cache_bytes: float
    cache_gbs: float
    bandwidth_gbs: float

    def time_us(self, nbytes: float) -> float:
        """The fitted time of a kernel that moves ``nbytes``."""
        cached = self.cache_gbs > 0.0 and nbytes <= self.cache_bytes
        return self.kernel_us + nbytes / ((self.cache_gbs if cached else self.bandwidth_gbs) * 1e3)


def fit_memory(nbytes: Sequence[float], times_us: Sequence[float]) -> Memory:
    """The floor and rates of pointwise kernels that move ``nbytes``, in rising order.

    The floor is the median time of the small sizes, less what their traffic takes. For each place where a cache could
    end, both rates are medians over their sizes; the best place is kept, and none unless a cache makes the misfit a
    tenth smaller. Raises ValueError when no size takes longer than the smallest.
    """
    plain = _settled(nbytes, times_us, 0)
    splits = [_settled(nbytes, times_us, at) for at in range(2, len(nbytes) - 1)]
    best = min(
        [fit for fit in splits if fit is not None and fit.cache_gbs > fit.bandwidth_gbs],
        default=plain,
        key=(lambda fit: _misfit(fit, nbytes, times_us)),
    )
    if plain is None or best is None:
        raise ValueError("no size takes longer than the smallest: nothing to fit a rate to")
    return best if _misfit(best, nbytes, times_us) < 0.9 * _misfit(plain, nbytes, times_us) else plain


_SMALL_BYTES = 1 << 16
_ROUNDS = 4


def _settled(nbytes: Sequence[float], times_us: Sequence[float], split: int) -> Memory | None:
    """Floor and rates by turns: either needs the other. None where a side has nothing to tell a rate by."""
    small = [i for i in range(len(nbytes)) if nbytes[i] <= _SMALL_BYTES] or [0]
    floor = min(times_us)
    fit: Memory | None = None
    for _ in range(_ROUNDS):
        inner = _rate(nbytes[:split], times_us[:split], floor) if split else 0.0
        outer = _rate(nbytes[split:], times_us[split:], floor)
        if inner is None or outer is None:
            return None
        fit = Memory(floor, nbytes[split - 1] if split else 0.0, inner, outer)
        left = statistics.median(times_us[i] - (fit.time_us(nbytes[i]) - floor) for i in small)
        floor = max(_LEAST_US, min(left, min(times_us)))
    return fit and Memory(floor, fit.cache_bytes, fit.cache_gbs, fit.bandwidth_gbs)


def _rate(nbytes: Sequence[float], times_us: Sequence[float], floor: float) -> float | None:
    """GB/s beyond the floor, from the sizes whose traffic shows; None where that of none does."""
    shown = [(b, t - floor) for b, t in zip(nbytes, times_us, strict=True) if t > 1.5 * floor]
    return statistics.median(b / t / 1e3 for b, t in shown) if shown else None


def _misfit(fit: Memory | None, nbytes: Sequence[float], times_us: Sequence[float]) -> float:
    if fit is None:
        return math.inf
    return sum(math.log(fit.time_us(b) / t) ** 2 for b, t in zip(nbytes, times_us, strict=True))


def fit_peak(dtype: str, flops: Sequence[float], times_us: Sequence[float], kernel_us: float) -> Peak:
    """Floor, rate and ramp of matrix products whose launches take ``kernel_us``; no ramp where that fits as well.

    The floor is looked for between nothing and what the fastest product takes beyond ``kernel_us``, the ramp by tens,
    both then more finely around the best; the rate is a mean of logarithms, and hardly above the best that was seen.
    """
    fit = partial(_with_ramp, dtype, flops, times_us, kernel_us)
    most = max(0.0, min(times_us) - kernel_us)
    floors = sorted({most * part / _FLOORS for part in range(_FLOORS + 1)})
    ramps = [0.0, *(10.0**power for power in range(2, 14))]
    best = min((fit(ramp, floor) for floor in floors for ramp in ramps), key=_misfit_of)
    for step in (10**0.25, 10**0.05, 10**0.01):
        around = [best[1].ramp * step**power for power in range(-5, 6)]
        best = min((best, *(fit(ramp, floor) for floor in floors for ramp in around)), key=_misfit_of)
    return best[1]


def _misfit_of(found: tuple[float, Peak]) -> float:
    return found[0]


def _with_ramp(
    dtype: str, flops: Sequence[float], times_us: Sequence[float], kernel_us: float, ramp: float, more_us: float
) -> tuple[float, Peak]:
    """The misfit, and the peak of the best rate for ``ramp`` behind a floor of ``more_us``. Sizes that the floor hides
    have no say in the rate."""
    unit = Peak(dtype, 1.0, ramp)
    floor = kernel_us + more_us
    known = list(zip(flops, times_us, strict=True))
    shown = [(f, t) for f, t in known if t > 1.5 * floor] or known[-1:]
    behind = [(f, max(t - floor, 0.1 * t)) for f, t in shown]
    rate = math.exp(statistics.fmean(math.log(unit.time_us(f) / t) for f, t in behind))
    seen = max(f / t for f, t in behind) / 1e3
    peak = Peak(dtype, min(rate, _ABOVE * seen), ramp, more_us)
    misfit = sum(math.log((kernel_us + peak.time_us(f)) / t) ** 2 for f, t in known)
    return misfit, peak


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of one or more values."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high
