"""The watch after a decision: one look at the clock in many calls tells whether the program has become another one."""

from __future__ import annotations

from collections import deque

from pygraph.runtime.selection.statistics import lower_median

__all__ = ["Watch"]

_PERIODS = 5
"""Periods whose median counts, so that pauses and idle hours do not."""


class Watch:
    """Compares the time per period with ``reference``, seconds, by default that of the first ones; ``factor`` is how
    far it may move, up or down."""

    def __init__(self, factor: float, reference: float | None = None) -> None:
        self.reference = reference
        self._factor = factor
        self._before: float | None = None
        self._times: deque[float] = deque(maxlen=_PERIODS)

    def observe(self, now: float) -> bool:
        """Told the time, in seconds, at the end of each period: whether the program has changed for good."""
        if self._before is not None:
            self._times.append(max(now - self._before, 1e-12))
        self._before = now
        if len(self._times) < _PERIODS:
            return False
        usual = lower_median(self._times)
        if self.reference is None:
            self.reference = usual
            self._times.clear()
            return False
        return not 1 / self._factor <= usual / self.reference <= self._factor
