"""Calls of small programs: uncaptured, replayed where they were, and replayed with every argument moved.

Probes and validation time the same three, with different numbers of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from pygraph.calibration.targets import Program, Target, captured
from pygraph.calibration.timing import Sampler

__all__ = ["moved", "replayed", "uncaptured"]

_REPLAYS_AT_ONCE = 16
"""A replay counts as that many launches where a queue must not run full."""


def uncaptured(target: Target, programs: Sequence[Program]) -> list[Sampler]:
    """Host time of a call of each program."""
    return [target.host(_calling(program), program.launches) for program in programs]


def _calling(program: Program) -> Callable[[], object]:
    return lambda: program.fn(list(program.args))


def replayed(target: Target, programs: Sequence[Program], stack: ExitStack) -> list[Sampler]:
    """Host time of a replay of each at the addresses of the one before. ``stack`` closes what is replayed.

    Raises CaptureError where a program cannot be captured, as ``moved`` does.
    """
    return [target.host(_replaying(target, program, stack), _REPLAYS_AT_ONCE) for program in programs]


def moved(target: Target, programs: Sequence[Program], stack: ExitStack) -> list[Sampler]:
    """Host time of a replay of each in which no argument is where it was in the one before."""
    return [_half(target.host(_moving(target, program, stack), 2 * _REPLAYS_AT_ONCE)) for program in programs]


def _replaying(target: Target, program: Program, stack: ExitStack) -> Callable[[], object]:
    executable = captured(target, program)
    stack.callback(executable.close)
    replay, args = executable.replay, list(program.args)
    return lambda: replay(args)


def _moving(target: Target, program: Program, stack: ExitStack) -> Callable[[], object]:
    executable = captured(target, program)
    stack.callback(executable.close)
    replay, args, others = executable.replay, list(program.args), list(program.others)

    def call() -> None:
        replay(args)
        replay(others)

    return call


def _half(sampler: Sampler) -> Sampler:
    return lambda: sampler() / 2
