"""What is wiped off the stack."""

from __future__ import annotations

from pygraph.runtime.cuda.observe import wipe_stack


def test_wiping_the_stack_returns() -> None:
    for _ in range(1000):
        wipe_stack()
