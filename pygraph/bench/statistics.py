"""The statistics of a benchmark: medians, their spread, and ratios taken within rounds. Pure numbers.

Which samples belong together, and which may be shown, is decided in ``results``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LEVEL", "Ratio", "Spread", "geometric_mean", "median_interval", "ratio_within_rounds", "spread"]

LEVEL = 0.95
"""How sure an interval is, where there are enough samples."""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles, in the unit of the samples, and how many there were."""

    median: float
    low: float
    high: float
    count: int

    def as_json(self) -> dict[str, Any]:
        """Rounded to six digits."""
        return {
            "median": _rounded(self.median),
            "quartiles": [_rounded(self.low), _rounded(self.high)],
            "count": self.count,
        }


@dataclass(frozen=True)
class Ratio:
    """The median of ratios, an interval around it, how sure that is (0 to 1), and of how many rounds."""

    median: float
    low: float
    high: float
    confidence: float
    rounds: int

    def as_json(self) -> dict[str, Any]:
        """Rounded to six digits."""
        return {
            "ratio": _rounded(self.median),
            "interval": [_rounded(self.low), _rounded(self.high)],
            "confidence": round(self.confidence, 4),
            "rounds": self.rounds,
        }


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles. Raises ValueError without samples."""
    if not samples:
        raise ValueError("there are no samples")
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(middle, low, high, len(samples))


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """An interval for the median of what ``samples`` are drawn from, and how sure it is, whatever their distribution.

    It lies between two order statistics: the k-th smallest and the k-th largest enclose the median with a probability
    of 1 - 2·P(B < k), B binomial with n tries of ½. The narrowest that reaches ``LEVEL`` is taken; with fewer than six
    samples none does, and the whole range is given with what it has. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there are no samples")
    ordered = sorted(samples)
    count = len(ordered)
    chosen, confidence = 1, 1 - 2 * 0.5**count
    tail = 0.5**count
    for k in range(2, count // 2 + 1):
        tail += math.comb(count, k - 1) * 0.5**count
        if 1 - 2 * tail < LEVEL:
            break
        chosen, confidence = k, 1 - 2 * tail
    return ordered[chosen - 1], ordered[count - chosen], max(confidence, 0.0)


def ratio_within_rounds(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The ratio of two sides, round by round. Raises ValueError where rounds are missing, or a time is not positive."""
    if len(above) != len(below):
        raise ValueError(f"{len(above)} rounds of one side, {len(below)} of the other")
    if min(*above, *below, 1.0) <= 0:
        raise ValueError("a time is not positive")
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    low, high, confidence = median_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, confidence, len(ratios))


def geometric_mean(values: Sequence[float]) -> float | None:
    """The geometric mean of positive values; None of none."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
