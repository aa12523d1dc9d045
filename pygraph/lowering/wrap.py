"""Puts replayable regions in the place of the partition functions of a compiled program.

Which regions may be captured is decided before; how they are captured is the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["RegionFunction", "wrap_regions"]

RegionFunction = Callable[[list[Any]], Sequence[Any]]
"""A partition function: takes its arguments in a list, which it clears, and returns its results."""


def wrap_regions(compiled: Any, wrappers: Sequence[Callable[[RegionFunction], RegionFunction] | None]) -> None:
    """Replace partition ``i`` of ``compiled`` by ``wrappers[i]`` of it; None leaves it as it is."""
    if not any(wrappers):
        return
    compiled.recursively_apply_fns([wrapper or _same for wrapper in wrappers])


def _same(function: RegionFunction) -> RegionFunction:
    return function
