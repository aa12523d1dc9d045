"""The options of measured selection, checked once. Under what names users see them is the backend's business."""

from __future__ import annotations

from dataclasses import dataclass

from pygraph.errors import OptionError

__all__ = ["SelectionOptions"]


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """How a trial is run, and when there is another.

    ``fraction`` of the time of ``horizon`` calls is the budget of lost time. ``alpha``: the chance that a trial leaves
    out a candidate that is not slower, spent in equal parts over ``looks`` (rounds after which it is looked).
    ``margin``: a gain below it is none (log-ratio, so about a fraction). ``longest``: calls in a block. ``period``:
    calls between two looks at the clock after a decision. ``drift``: the factor by which the time per call has to
    change for another trial; the n-th has a budget of 2⁻ⁿ of the first, and there are at most ``trials``.
    Raises OptionError when a value is out of range.
    """

    fraction: float = 0.02
    horizon: int = 1000
    alpha: float = 0.01
    margin: float = 0.01
    looks: tuple[int, ...] = (2, 4, 6, 8, 12, 16, 24)
    longest: int = 96
    period: int = 256
    drift: float = 1.25
    trials: int = 6

    def __post_init__(self) -> None:
        _within("fraction", self.fraction, 0.0, 1.0)
        _within("alpha", self.alpha, 0.0, 0.5)
        _within("margin", self.margin, 0.0, 1.0)
        _within("drift", self.drift, 1.0, 1e6)
        for name, least in {"horizon": 1, "longest": 2, "period": 2, "trials": 1}.items():
            if getattr(self, name) < least:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.looks or self.looks[0] < 2 or list(self.looks) != sorted(set(self.looks)):
            raise OptionError(f"looks is {self.looks}; it must grow, from at least 2")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low < value < high:
        raise OptionError(f"{name} is {value}; it must lie between {low:g} and {high:g}")
