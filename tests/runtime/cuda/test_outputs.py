"""What a captured region returned, and the small parts that need no GPU."""

from __future__ import annotations

import torch

from pygraph.runtime.cuda.memory import _joined
from pygraph.runtime.cuda.outputs import repeated
from pygraph.runtime.cuda.stack import wipe_stack


def test_an_object_returned_twice_is_named_by_where_it_came_first() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    assert repeated([a, 3, b, a, 3, a]) == {3: 0, 5: 0}


def test_segments_that_touch_count_as_one() -> None:
    assert _joined([(100, 50), (150, 50), (300, 10), (310, 5), (400, 1)]) == [(100, 100), (300, 15), (400, 1)]


def test_wiping_the_stack_returns() -> None:
    for _ in range(1000):
        wipe_stack()
