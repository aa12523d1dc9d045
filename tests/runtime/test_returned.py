"""What is found out about the values that a region returned."""

from __future__ import annotations

import torch

from pygraph.runtime.tensors import repeated


def test_an_object_returned_twice_is_named_by_where_it_came_first() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    assert repeated([a, 3, b, a, 3, a]) == {3: 0, 5: 0}
