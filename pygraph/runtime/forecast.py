"""Estimated workspaces of uncaptured sizes, from those of captured ones.

captured at 4, 20, 64   each intermediate's bytes are a polynomial of the size ─▸ at 33: packed as these would be
other intermediates     the bytes of the workspace are the polynomial
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pygraph.program.layout import Lifetime, lifetimes, pack
from pygraph.program.program import Program

__all__ = ["Workspace", "fitted", "workspace_at"]

Point = tuple[int, ...]
"""The numbers of a size."""

_ORDER = 2
"""Highest power of a number: intermediates grow with batch × length × length at most."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a replay's own: ``nbytes`` in total, for intermediates at multiples of ``alignment``."""

    nbytes: int
    lives: tuple[Lifetime, ...] = ()
    alignment: int = 1

    @staticmethod
    def of(program: Program) -> Workspace:
        """The workspace of a program, with its intermediates."""
        recording, layout = program.recording, program.layout
        lives = lifetimes(recording, program.slots, layout.fresh, program.order)
        return Workspace(layout.nbytes, lives, recording.alignment)


def workspace_at(points: Sequence[Point], known: Sequence[Workspace], at: Point) -> int | None:
    """Bytes of the workspace at the size ``at``, from those ``known`` at ``points``; None if these do not suffice."""
    near = min(range(len(points)), key=lambda each: _distance(points[each], at))
    lives, alignment = known[near].lives, known[near].alignment
    alike = [each for each, other in enumerate(known) if _shapes(other.lives) == _shapes(lives)]
    there = [points[each] for each in alike]
    if _order(there) == _order(points) and pack(lives, alignment).nbytes == known[near].nbytes:
        sizes = [fitted(there, [known[each].lives[n].nbytes for each in alike], at) for n in range(len(lives))]
        if None not in sizes:
            made = [replace(life, nbytes=size or 0) for life, size in zip(lives, sizes, strict=True)]
            return pack(made, alignment).nbytes
    return fitted(points, [each.nbytes for each in known], at)


def _shapes(lives: Sequence[Lifetime]) -> list[Lifetime]:
    return [replace(life, nbytes=0) for life in lives]


def fitted(points: Sequence[Point], values: Sequence[int], at: Point) -> int | None:
    """The value at the point ``at`` of a polynomial fitted to ``values``, of the highest order that they determine.
    Errors are relative to a value, and weigh more at nearer points. None if ``at`` differs from all points in a number
    that all of them share."""
    varying, order = _varying(points), _order(points)
    if any(number != points[0][axis] for axis, number in enumerate(at) if axis not in varying):
        return None
    largest = [max(point[axis] for point in points) for axis in varying]

    def terms(point: Point) -> list[float]:
        scaled = [point[axis] / most for axis, most in zip(varying, largest, strict=True)]
        powers = itertools.product(range(order + 1), repeat=len(scaled))
        return [math.prod(map(pow, scaled, each)) for each in powers]

    weights = [1 / (max(value, 1) * (0.01 + _distance(point, at))) for point, value in zip(points, values, strict=True)]
    scales = torch.tensor(weights, dtype=torch.float64)[:, None]
    table = torch.tensor([terms(point) for point in points], dtype=torch.float64)
    factors = torch.linalg.lstsq(table * scales, torch.tensor(values, dtype=torch.float64)[:, None] * scales).solution
    found = float(torch.tensor(terms(at), dtype=torch.float64) @ factors[:, 0])
    return max(0, math.ceil(found - 1e-3))


def _varying(points: Sequence[Point]) -> list[int]:
    """Positions of the numbers that differ."""
    return [axis for axis, numbers in enumerate(zip(*points, strict=True)) if len(set(numbers)) > 1]


def _order(points: Sequence[Point]) -> int:
    """The highest power that the number of points determines."""
    return max(order for order in range(_ORDER + 1) if (order + 1) ** len(_varying(points)) <= len(points))


def _distance(point: Point, at: Point) -> float:
    return sum(abs(math.log((number + 1) / (other + 1))) for number, other in zip(point, at, strict=True))
