"""Log of a capture: where the tensors of its operators lie."""

from __future__ import annotations

import torch

from pygraph import compat
from pygraph.graphs.watch import Watch


def test_memory_that_no_operator_makes_is_not_taken_for_memory_that_is_gone() -> None:
    """As Inductor's code makes it: storages that are made then lie where others lay."""
    x = torch.ones(8)
    watch = Watch(lambda: None, x.device, [x])
    with watch:
        for _ in range(50):
            made = x.sin()
            assert watch.is_known(made)
            del made
            with compat.without_dispatch_modes():
                unseen = [torch.empty(8) for _ in range(4)]
            assert not any(map(watch.is_known, unseen))
            unseen[0].cos()
            assert watch.log[-1][1].startswith("-1+0")
