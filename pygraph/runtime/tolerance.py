"""How far a replay may lie from an uncaptured run, in results that non-deterministic launches decide.

A replay must be no further from an uncaptured run than uncaptured runs are from one another. That is judged block by
block: a block is up to BLOCK neighbours in a row, so that a small row is not hidden by a large one. In a block, an
element of the replay may be off by

    FACTOR · spread + allowance(dtype) · magnitude

``spread`` is the largest difference between the reference and other uncaptured runs, ``magnitude`` the largest
magnitude of the reference, both within the block. One element alone has no spread to rely on: a sum of few terms comes
out alike in three runs by chance. Its neighbours are sums like it, and stand in for runs that were not made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

__all__ = [
    "AGREED",
    "BLOCK",
    "COARSE",
    "FACTOR",
    "LOOSE",
    "RUNS",
    "SHORT",
    "TERMS",
    "Distance",
    "Spread",
    "Unlike",
    "allowance",
    "beyond",
    "distance",
    "shares",
    "widened",
]

BLOCK = 32
"""Neighbours that share a spread, at most. Blocks end with their row."""

SHORT = 8
"""Rows with fewer elements are not told apart: too few stand in for one another, and of a million rows some would be
refused."""

TERMS = 64
"""What is allowed in any case, in units of eps: re-ordered additions of n terms differ by about sqrt(n) · eps of the
largest partial sum, and 64 allows some 4,000 terms. The largest result of a block stands in for that sum."""

COARSE = 2.0**-5
"""No more than this part, or one eps if that is more, is allowed in any case. In bfloat16, 64 · eps is a half, and
hardly anything would be wrong; nobody keeps long sums in types as coarse."""

RUNS = (3, 9)
"""How many more times a region that does not repeat itself runs uncaptured: so many at first, and so many more where
the replay is not within the spread of those."""

FACTOR = 4
"""How many times as far from the reference as the furthest of the other uncaptured runs a right replay may lie.

A right replay and the others are drawn alike. For one element with normal errors, with nothing allowed in any case, 4
refuses a right replay with a chance of 0.8 % after 3 runs, and of 5 in a million after 12, while what is wrong stays
outside, however often the region runs. Neighbours make that rarer still. In simulations of sums in random order
(float32, float16, bfloat16; 3 to 50 terms of like and of unlike magnitude; 10⁶ elements in all) no right replay of a
tensor was refused after 3 runs. Of 2000 sums of 200 bfloat16 numbers, each a tensor by itself, 8 were; none after 12.
"""

LOOSE = 0.01
"""The part of a result's norm that a replay which was accepted may be off by, where another capture confirms all of its
addresses.

Small differences grow along a program: where a rounding error changes the sign that a ReLU sees, a whole gradient
changes, in one run of twenty or of a thousand, and no number of runs tells how far off the next one may be."""

AGREED = "has other values, though uncaptured runs agree on it bit for bit"
"""What is said of a result that any difference is too much for."""

_CHUNK = 1 << 22
"""Elements that are compared at a time, whole blocks: comparing takes memory of its own, several times theirs."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two tensors lie apart: the largest absolute difference (``apart``) and the largest finite magnitude of
    the first of them (``magnitude``) in each block, in float64. Rows have ``width`` elements, and blocks go by rows."""

    apart: torch.Tensor
    magnitude: torch.Tensor
    width: int

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return float(self.apart.max()) if self.apart.numel() else 0.0

    def start(self, block: int) -> int:
        """The element that a block begins at."""
        row, column = divmod(block, -(-self.width // BLOCK))
        return row * self.width + column * BLOCK

    @property
    def relative(self) -> float:
        """The norm of the differences as a part of that of the magnitudes."""
        apart, scale = float(self.apart.norm()), float(self.magnitude.norm())
        return apart / scale if scale else float(apart > 0)

    @property
    def share(self) -> float:
        """The largest difference as a part of the largest magnitude."""
        scale = float(self.magnitude.max()) if self.magnitude.numel() else 0.0
        return self.largest / scale if scale else 0.0


Spread = Sequence[Distance | float | None]
"""For each output, then for each written argument by its position, how far uncaptured runs lie from the reference: None
where they agree bit for bit; a Distance; or, for other values than those that ran, a part of the largest magnitude."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """Which of the results of two runs are too unlike, by index, and in what way."""

    index: int
    how: str


def widened(
    spread: Spread, reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor], equal: Sequence[bool]
) -> Spread | Unlike:
    """``spread`` with one more uncaptured run in it, or what nothing is tolerated in and differs all the same.

    ``equal`` says which results have the bits of the reference's.
    """
    parts = list(spread)
    for index, (expected, actual) in enumerate(zip(reference, other, strict=True)):
        if equal[index]:
            continue
        found = distance(expected, actual)
        if isinstance(found, str):
            return Unlike(index, found)
        before = parts[index]
        if isinstance(before, Distance):
            found = replace(found, apart=torch.maximum(before.apart, found.apart))
        parts[index] = found
    return parts


def shares(spread: Spread) -> Spread:
    """``spread`` for other values, without memory on the device."""
    return tuple(part.share if isinstance(part, Distance) else part for part in spread)


def beyond(
    spread: Spread,
    reference: Sequence[torch.Tensor],
    other: Sequence[torch.Tensor],
    equal: Sequence[bool],
    *,
    loosely: bool = False,
) -> Unlike | None:
    """The first result of a replay (``other``) that lies further from the reference's than it may.

    ``loosely``, a result in which uncaptured runs differ may also be off by LOOSE of its norm.
    """
    for index, part in enumerate(spread):
        if equal[index]:
            continue
        found = distance(reference[index], other[index])
        if loosely and part and not isinstance(found, str) and found.relative <= LOOSE:
            continue
        if part is None:
            return Unlike(index, AGREED)
        how = found if isinstance(found, str) else _too_far(found, part, reference[index].dtype)
        if how is not None:
            return Unlike(index, how)
    return None


def _too_far(found: Distance, part: Distance | float, dtype: torch.dtype) -> str | None:
    """Where and by how much ``found`` exceeds what is allowed, if it does."""
    if not found.apart.numel():
        return None
    spread = part.apart if isinstance(part, Distance) else torch.full_like(found.apart, part) * found.magnitude.max()
    allowed = FACTOR * spread + allowance(dtype) * found.magnitude
    excess = found.apart - allowed
    at = int(excess.argmax())
    if float(excess[at]) <= 0:
        return None
    off, limit, runs = (float(each[at]) for each in (found.apart, allowed, spread))
    where = f"within {BLOCK} elements from {found.start(at)} on"
    return f"is off by {off:.2e} {where}, allowed are {limit:.2e} (uncaptured runs are {runs:.2e} apart)"


def allowance(dtype: torch.dtype) -> float:
    """The part of a block's largest magnitude that a replay may be off by, however close uncaptured runs are."""
    eps = torch.finfo(dtype).eps
    return min(TERMS * eps, max(eps, COARSE))


def distance(reference: torch.Tensor, other: torch.Tensor) -> Distance | str:
    """How far two tensors of one shape lie apart, or what no tolerance is for: integers and booleans that differ, a NaN
    or an infinity that only one of them has at its place. Any NaN equals any other."""
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return "has another shape or dtype"
    if not (reference.is_floating_point() or reference.is_complex()):
        return "holds other integers" if not torch.equal(reference, other) else _none(reference.device)
    found = [_of_block(*pieces) for pieces in zip(_pieces(reference), _pieces(other), strict=True)]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return "has a NaN or an infinity at another place"
    if not known:
        return _none(reference.device)
    apart, magnitude = (torch.cat(each) for each in zip(*known, strict=True))
    return Distance(apart, magnitude, _width(reference))


def _none(device: torch.device) -> Distance:
    nothing = torch.zeros(0, dtype=torch.float64, device=device)
    return Distance(nothing, nothing, 1)


def _width(tensor: torch.Tensor) -> int:
    """Elements in a row."""
    last = int(tensor.shape[-1]) if tensor.dim() else 1
    return last if last >= SHORT else tensor.numel()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of ``tensor`` by rows, as many at a time as _CHUNK allows. No block reaches into two pieces."""
    if not tensor.numel():
        return
    rows = tensor.detach().reshape(-1, _width(tensor))
    for some in rows.split(max(1, _CHUNK // rows.shape[1])):
        yield from some.split(_CHUNK, 1)


def _of_block(reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The largest difference and magnitude in each block of two pieces; None where they are finite at different places,
    or infinite in different ways."""
    wide = torch.complex128 if reference.is_complex() else torch.float64
    expected, actual = reference.to(wide), other.to(wide)
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return None
    alike = (torch.isnan(expected) & torch.isnan(actual)) | (expected == actual)
    if not bool((finite | alike).all()):
        return None
    nothing = torch.zeros((), dtype=torch.float64, device=expected.device)
    found = (torch.where(finite, each.abs(), nothing) for each in (expected - actual, expected))
    apart, magnitude = (_by_block(each) for each in found)
    return apart, magnitude


def _by_block(rows: torch.Tensor) -> torch.Tensor:
    """The maximum of each block of non-negative numbers."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK))
    return padded.view(rows.shape[0], -1, BLOCK).amax(-1).reshape(-1)
