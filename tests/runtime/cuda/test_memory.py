"""What the small parts of a capture's memory do that need no GPU."""

from __future__ import annotations

from pygraph.runtime.cuda.memory import _joined
from pygraph.runtime.cuda.stack import wipe_stack


def test_segments_that_touch_count_as_one() -> None:
    assert _joined([(100, 50), (150, 50), (300, 10), (310, 5), (400, 1)]) == [(100, 100), (300, 15), (400, 1)]


def test_wiping_the_stack_returns() -> None:
    for _ in range(1000):
        wipe_stack()
