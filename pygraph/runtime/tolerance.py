"""How far a replay may lie from an uncaptured run of a region that does not repeat itself.

A replay must be no further from an uncaptured run than uncaptured runs are from one another. What is run, and on what,
is ``comparison``'s subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "COARSE",
    "FACTOR",
    "RUNS",
    "TOLERANCE",
    "Gap",
    "Spread",
    "Unlike",
    "allowance",
    "beyond",
    "gap",
    "repeats",
    "unrepeated",
    "widened",
]

TOLERANCE = 64
"""What is allowed in any case: TOLERANCE · eps(dtype) · max|reference|, for each tensor by itself (but see COARSE).

Re-ordered additions of n terms differ by about sqrt(n) · eps of the largest partial sum; 64 allows some 4,000 terms.
"""

COARSE = 2.0**-4
"""No more than this part of max|reference|, or one eps if that is more, is allowed in any case. In bfloat16, 64 · eps
is half of max|reference|, and hardly anything would be wrong; nobody keeps long sums in types as coarse."""

RUNS = 3
"""How many more times a region that does not repeat itself runs uncaptured."""

FACTOR = 4
"""How many times as far from the first uncaptured run as the furthest of RUNS others a right replay may lie.

A right replay and the others are drawn alike, so that with a factor of 1 it would be the furthest of RUNS + 1, and
refused, one time in RUNS + 1. A distance is a maximum over elements, and such maxima hardly scatter: with normal
errors, 4 refuses a right replay of a single element one time in a hundred, and of ten elements less than once in a
million. What is wrong by ten times the spread stays well outside.
"""

Spread = tuple[float | None, ...]
"""For each output, then for each written argument by its position: None where uncaptured runs agree bit for bit, else
their largest difference as a part of the largest magnitude, so that it can be used for other values too."""

_CHUNK = 1 << 22
"""Elements that are compared at a time: comparing takes memory of its own, several times theirs."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest absolute difference between two tensors, and the largest finite magnitude in the first of them."""

    distance: float
    scale: float


@dataclass(frozen=True, slots=True)
class Unlike:
    """Which of the results of two runs are too unlike, by index, and in what way."""

    index: int
    how: str


def repeats(spread: Spread) -> bool:
    """Whether the region did the same each time, bit for bit."""
    return all(part is None for part in spread)


def widened(spread: Spread, reference: Sequence[Any], other: Sequence[Any], equal: Sequence[bool]) -> Spread | Unlike:
    """``spread`` with one more uncaptured run in it, or what nothing is tolerated in and differs all the same.

    ``equal`` says which results have the bits of the reference's.
    """
    parts = list(spread)
    for index, (expected, actual) in enumerate(zip(reference, other, strict=True)):
        if equal[index]:
            continue
        found = gap(expected, actual)
        if isinstance(found, str):
            return Unlike(index, found)
        parts[index] = max(parts[index] or 0.0, found.distance / found.scale if found.scale else 0.0)
    return tuple(parts)


def unrepeated(spread: Spread, equal: Sequence[bool]) -> Unlike | None:
    """The first result of a replay that uncaptured runs repeat and the replay does not."""
    for index, (part, same) in enumerate(zip(spread, equal, strict=True)):
        if part is None and not same:
            return Unlike(index, "has other values, though uncaptured runs agree on it bit for bit")
    return None


def beyond(spread: Spread, reference: Sequence[Any], other: Sequence[Any], equal: Sequence[bool]) -> Unlike | None:
    """The first result of a replay (``other``) that lies further from the reference's than it may."""
    wrong = unrepeated(spread, equal)
    if wrong is not None:
        return wrong
    for index, part in enumerate(spread):
        if part is None or equal[index]:
            continue
        found = gap(reference[index], other[index])
        if isinstance(found, str):
            return Unlike(index, found)
        bound = found.scale * max(allowance(reference[index].dtype), FACTOR * part)
        if not found.distance <= bound:
            apart = f"uncaptured runs are {found.scale * part:.2e} apart"
            return Unlike(index, f"is off by {found.distance:.2e}, allowed are {bound:.2e} ({apart})")
    return None


def allowance(dtype: torch.dtype) -> float:
    """The part of a tensor's largest magnitude that a replay may be off by, however close uncaptured runs are."""
    eps = torch.finfo(dtype).eps
    return min(TOLERANCE * eps, max(eps, COARSE))


def gap(reference: torch.Tensor, other: torch.Tensor) -> Gap | str:
    """How far two tensors of one shape lie apart, or what no tolerance is for: integers and booleans that differ, a NaN
    or an infinity that only one of them has at its place. Any NaN equals any other."""
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return "has another shape or dtype"
    if not (reference.is_floating_point() or reference.is_complex()):
        return Gap(0.0, 0.0) if torch.equal(reference, other) else "holds other integers"
    left, right = reference.detach().reshape(-1), other.detach().reshape(-1)
    distance = scale = 0.0
    for start in range(0, left.numel(), _CHUNK):
        found = _gap(left[start : start + _CHUNK], right[start : start + _CHUNK])
        if found is None:
            return "has a NaN or an infinity at another place"
        distance, scale = max(distance, found.distance), max(scale, found.scale)
    return Gap(distance, scale)


def _gap(reference: torch.Tensor, other: torch.Tensor) -> Gap | None:
    """The same for some elements; None where they are finite at different places, or infinite in different ways."""
    wide = torch.complex128 if reference.is_complex() else torch.float64
    expected, actual = reference.to(wide), other.to(wide)
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return None
    alike = (torch.isnan(expected) & torch.isnan(actual)) | (expected == actual)
    if not bool((finite | alike).all()):
        return None
    nothing = torch.zeros((), dtype=torch.float64, device=expected.device)
    distance = torch.where(finite, (expected - actual).abs(), nothing).max()
    return Gap(float(distance), float(torch.where(finite, expected.abs(), nothing).max()))
