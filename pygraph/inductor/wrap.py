"""Puts replayable regions in the place of the partition functions of a compiled program.

Which regions may be captured is decided before; how they are captured is the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["MAIN", "PROGRAM", "READY", "REPLAY", "Boxed", "RegionFunction", "bind", "boxed", "switch", "wrap_regions"]

MAIN, READY, REPLAY, PROGRAM = "call", "_pygraph_ready", "_pygraph_replay", "_pygraph_program"
"""What a shortcut's text calls itself, and what is bound to it."""

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


def bind(
    text: str,
    namespace: Mapping[str, Any],
    ready: Callable[[], bool],
    replay: Callable[[list[Any]], Sequence[Any] | None],
    program: Boxed,
) -> Boxed:
    """The function of a shortcut's ``text`` (``direct``) for ``program``.

    ``replay`` returns None, with the list as it was, when it declines. ``ready`` says whether a replay is to be
    expected: where it is not, nothing is prepared for one. ``namespace`` is that of the emitted module.
    """
    names = {**namespace, READY: ready, REPLAY: replay, PROGRAM: program}
    exec(compile(text, "<pygraph shortcut>", "exec"), names)
    made: Boxed = names[MAIN]
    return made


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
