"""Work of a call, counted in steps of the interpreter: the same on every machine, busy or idle.

    assert work(lambda: run(four_thousand)) < 1.1 * 4 * work(lambda: run(one_thousand))

A step is a line that runs, a call, a return or an exception. Work inside of C functions is not counted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["work"]


def work(call: Callable[[], object], most: int = 100_000_000) -> int:
    """The number of steps that ``call`` takes in this thread.

    Args:
        call: what is counted.
        most: the call ends in an AssertionError after so many steps, which an ``except Exception`` may catch.
    """
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        steps += 1
        if steps > most:
            raise AssertionError(f"more than {most} steps")
        return count

    before = sys.gettrace()
    gc.disable()  # a collection would run the finalizers of others
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    assert steps <= most, f"more than {most} steps"
    return steps
