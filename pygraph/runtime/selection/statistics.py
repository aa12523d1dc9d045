"""The statistics of a trial: Student's t, and the mean of paired differences with its uncertainty.

Pure functions of numbers; which numbers are compared, and when, is the trial's business.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["Difference", "difference", "least_of_cold", "lower_median", "mild_median", "spread", "t_quantile"]

_STRAY = 5.0
"""Standard deviations from the median at which a difference is left out."""
_PRIOR_FREEDOM = 3
_INCREDIBLE = 5.0
"""A variance that is so many times the guessed one refutes the guess."""
_COLD = 2.0
"""Single calls of what has not run for long may take so many times as long as the same calls in a row."""
_NORMAL = NormalDist()
_MAD = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of log-ratios, with its standard error, its degrees of freedom, and how far it may be off whatever the
    number of samples (``allowance``, from the ends of blocks)."""

    mean: float
    error: float
    freedom: int
    allowance: float

    def least(self, alpha: float) -> float:
        """What the true log-ratio is above, but for a chance of ``alpha``."""
        return self.mean - t_quantile(alpha, self.freedom) * self.error - self.allowance

    def most(self, alpha: float) -> float:
        """What the true log-ratio is below, but for a chance of ``alpha``."""
        return self.mean + t_quantile(alpha, self.freedom) * self.error + self.allowance


def difference(
    values: Sequence[float], weights: Sequence[float], allowances: Sequence[float], prior: float
) -> Difference:
    """The weighted mean of ``values``, whose variances go as one over ``weights``.

    ``prior`` is the standard deviation at weight 1 as guessed beforehand; it counts as some degrees of freedom, so that
    two values that happen to agree do not pass for certainty (a moderated t statistic; Smyth 2004). Values that vary so
    much that the guess cannot be right are judged without it.
    Values far off the median, at most a quarter of them, are left out.
    """
    kept = _kept(values, weights, prior)
    total = sum(weights[i] for i in kept)
    mean = sum(weights[i] * values[i] for i in kept) / total
    squares = sum(weights[i] * (values[i] - mean) ** 2 for i in kept)
    believed = 0 if squares > _INCREDIBLE * prior * prior * max(1, len(kept) - 1) else _PRIOR_FREEDOM
    freedom = len(kept) - 1 + believed
    variance = (squares + believed * prior * prior) / freedom
    allowance = sum(weights[i] * allowances[i] for i in kept) / total
    return Difference(mean, math.sqrt(variance / total), freedom, allowance)


def least_of_cold(values: Sequence[float], noise: float, alpha: float) -> float:
    """What the log-ratio of calls in a row is above, but for a chance of ``alpha``, as single cold calls tell.

    Each of ``values`` has a standard deviation of ``noise`` as guessed beforehand, and is too large by an unknown
    factor. All of them are above the least one, so that each may be off with the n-th root of the chance.
    """
    quantile = t_quantile(alpha ** (1 / len(values)), _PRIOR_FREEDOM)
    return min(values) - math.log(_COLD) - quantile * noise


def _kept(values: Sequence[float], weights: Sequence[float], prior: float) -> list[int]:
    """Positions of the values that are not far off, at least three quarters of them."""
    everything = range(len(values))
    if len(values) < 4:
        return list(everything)
    middle = _median(values)
    distance = [abs(value - middle) * math.sqrt(weight) for value, weight in zip(values, weights, strict=True)]
    scale = max(_MAD * _median(distance), prior)
    far = [one / scale for one in distance]
    outside = sorted((i for i in everything if far[i] > _STRAY), key=lambda i: -far[i])
    dropped = set(outside[: len(values) // 4])
    return [i for i in everything if i not in dropped]


def lower_median(values: Sequence[float]) -> float:
    """The median, the lower of the two middle values of an even number. Raises IndexError when there is none."""
    return sorted(values)[(len(values) - 1) // 2]


def mild_median(ratios: Sequence[float]) -> float:
    """The median, of the two middle values of an even number the one nearer to 1. Raises IndexError without any."""
    ordered = sorted(ratios)
    half = len(ordered) // 2
    return min(ordered[-half - 1 : half + 1], key=lambda ratio: abs(math.log(ratio)))


def spread(values: Sequence[float]) -> float:
    """The standard deviation of ``values`` as their median absolute deviation tells it."""
    middle = _median(values)
    return _MAD * _median([abs(value - middle) for value in values])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@functools.lru_cache(maxsize=1024)
def t_quantile(alpha: float, freedom: int) -> float:
    """The t that Student's distribution with ``freedom`` degrees exceeds with probability ``alpha`` < 0.5."""
    peak = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    t = -_NORMAL.inv_cdf(alpha)  # below the root, since the normal distribution has the thinner tail
    for _ in range(100):  # the tail is convex, so that Newton's steps from below never pass the root
        density = math.exp(peak - (freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = (_tail(t, freedom) - alpha) / density
        t += step
        if step <= 1e-9 * t:
            break
    return t


def _tail(t: float, freedom: int) -> float:
    """P(T > t) for t ≥ 0: the finite series for whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    series = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        series += term
    inner = math.sin(angle) * series
    within = (angle + inner) * 2 / math.pi if odd else inner
    return (1 - within) / 2
