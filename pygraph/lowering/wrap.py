"""Puts replayable regions in the place of the partition functions of a compiled program.

Which regions may be captured is decided before; how they are captured is the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Boxed", "RegionFunction", "boxed", "switch", "wrap_regions"]

Boxed = Callable[[list[Any]], Any]
"""A compiled program: takes its arguments in a list, which it clears."""

RegionFunction = Callable[[list[Any]], Sequence[Any]]
"""A partition function: takes its arguments in a list, which it clears, and returns its results."""


def wrap_regions(compiled: Any, wrappers: Sequence[Callable[[RegionFunction], RegionFunction] | None]) -> None:
    """Replace partition ``i`` of ``compiled`` by ``wrappers[i]`` of it; None leaves it as it is."""
    if not any(wrappers):
        return
    compiled.recursively_apply_fns([wrapper or _same for wrapper in wrappers])


def _same(function: RegionFunction) -> RegionFunction:
    return function


def boxed(program: Boxed) -> Boxed:
    """A plain function around a program that stays."""
    return switch(program, None)[0]


def switch(first: Boxed, owner: object) -> tuple[Boxed, Callable[[Boxed], None]]:
    """A plain boxed function that calls ``first``, and how to have it call another one. It costs what one call costs.

    Inductor's own object carries cache keys that would poison later plain compilations: it is not handed out.
    """
    program = first

    def run(args: list[Any]) -> Any:
        return program(args)

    def use(other: Boxed) -> None:
        nonlocal program
        program = other

    run._boxed_call = True  # type: ignore[attr-defined]
    run._pygraph_owner = owner  # type: ignore[attr-defined]
    return run, use
