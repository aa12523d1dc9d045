"""Decides whether a replay did what an uncaptured run did: pure functions of two outcomes.

    right when   a tensor of gradients that ``index_add_`` decides is off by the last bit, as between uncaptured runs
    wrong when   the same bit differs in any other result

Results that a non-deterministic launch decides have a tolerance; all others are compared by their bits. The replay must
be no further from the uncaptured run than uncaptured runs are from one another (``Spread``). That is judged block by
block: a block is up to BLOCK neighbours in a row, so that a large row does not hide a small one. In a block, an element
of the replay may be off by

    FACTOR · spread + min(TERMS · eps, COARSE) · magnitude

``spread`` is the largest difference between one uncaptured run and others, ``magnitude`` the largest magnitude of what
the replay is held against, both within the block. One element alone has no spread to rely on: a sum of few terms comes
out alike in three runs by chance. Its neighbours are sums like it, and stand in for runs that were not made.

Where that is not enough, what an uncaptured run does to those before it, a replay may do, too (``Surprise``). A float32
gradient that was rounded to bfloat16 on its way is an example: one sum of a million falls on the other side, another
one in each run, by 2**-8 of its magnitude, where no other run shows a difference.

The replay that is judged is the first one with its arguments. A second one with the same arguments says nothing: it is
right, too, where a replay returns what the one before it should have returned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from pygraph.runtime.provenance import Refusal

__all__ = ["ODD_REPLAY", "RANDOM_STATE", "RUNS", "Distance", "Outcome", "Spread", "Surprise", "distance", "judge"]

ODD_REPLAY = "odd-replay"
"""The refusal of a replay that lies outside of what uncaptured runs allow, in results which vary. Now and then one run
of many is the odd one, and that may be the replay: hardly twice in a row."""

RANDOM_STATE = Refusal("random-state", "the random state afterwards is another one")
"""Two runs drew otherwise, or somebody else did."""

RUNS = (3, 9)
"""How many more times a region that does not repeat itself runs uncaptured: so many at first, and so many more where
the replay is not within the spread of those."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effects of one run. Results are its outputs, and then the arguments that it may write.

    structure: of each output, all but values, and whose memory it is
    contents: fingerprints of the bits of each result; empty where they may be anything
    names: of the results
    rng: the state of the generator that it drew from, if it did
    results: the results themselves, where bits may not decide
    """

    structure: tuple[Hashable, ...]
    contents: tuple[bytes, ...]
    names: tuple[str, ...]
    rng: torch.Tensor | None
    results: list[Any] = field(compare=False)

    def differing(self, other: Outcome) -> list[int]:
        """The results in which two runs of one structure left other bits."""
        return [i for i, (mine, theirs) in enumerate(zip(self.contents, other.contents, strict=True)) if mine != theirs]

    def other_structure(self, other: Outcome) -> str | None:
        """The first thing but values in which ``other`` differs."""
        if len(self.structure) != len(other.structure):
            return f"{len(other.structure)} outputs instead of {len(self.structure)}"
        if len(self.contents) != len(other.contents):
            return "another number of operators is called"
        pairs = zip(self.names, self.structure, other.structure, strict=False)
        return next((f"{name} is {theirs} instead of {mine}" for name, mine, theirs in pairs if mine != theirs), None)

    def inexcusable(self, other: Outcome, varying: Sequence[bool]) -> str | None:
        """A structure that differs, or else the first result that does and that is not ``varying``."""
        differs = self.other_structure(other)
        if differs is not None:
            return differs
        wrong = next((index for index in self.differing(other) if not varying[index]), None)
        return None if wrong is None else f"{self.names[wrong]} has other values"

    def drew_otherwise(self, other: Outcome) -> bool:
        """True if two runs left other random states: they drew otherwise, or somebody else did."""
        return self.rng is not None and other.rng is not None and not torch.equal(self.rng, other.rng)


def judge(
    expected: Outcome, actual: Outcome, varying: Sequence[bool], spread: Spread, *, tolerant: bool = False
) -> Refusal | None:
    """Why a replay that did what ``actual`` tells may not be used, where an uncaptured run did what is ``expected``.

    varying: of each result, whether a launch that is known to be non-deterministic decides it
    spread: of uncaptured runs made so far, maybe of none
    tolerant: results on which those runs agree have a tolerance, too, since it was needed before

    More runs may lead to another answer than ``odd-replay``, and to no other refusal.
    """
    if expected.drew_otherwise(actual):
        return RANDOM_STATE
    wrong = expected.inexcusable(actual, varying)
    if wrong is not None:
        return Refusal("comparison-failed", f"replayed: {wrong}")
    furthest: tuple[int, str] = 0, ""
    total: _Surprises = {}
    for index in expected.differing(actual):
        name = expected.names[index]
        if not actual.results:
            return Refusal("comparison-budget", f"{name} varies, and results of a replay have no room")
        result, other, known = expected.results[index], actual.results[index], spread.distances.get(index)
        found = distance(result, other)
        how = found if isinstance(found, str) else found.outside(known, result.dtype)
        if known is None and (how is not None or not tolerant):
            return _doubt(f"{name} {how or 'has other values'}, though uncaptured runs agree on it")
        if how is None:
            continue
        let_off = None if isinstance(found, str) else found.surprise(known, result.dtype)
        if let_off is None:
            return _doubt(f"{name} {how}")
        _add(total, result.dtype, let_off)
        furthest = max(furthest, (let_off.blocks, f"{name} {how}"))
    return None if spread.covers(total) else _doubt(furthest[1])


def _doubt(detail: str) -> Refusal:
    return Refusal(ODD_REPLAY, f"non-deterministic: {detail}")


class Spread:
    """Differences between uncaptured runs on the same arguments and random numbers, those from a reference.

    distances: of each result in which any run differed, the largest ones
    runs: how many were made besides the reference
    """

    def __init__(self) -> None:
        self.distances: dict[int, Distance] = {}
        self.runs = 0
        self._surprises: list[_Surprises] = []

    def widen(self, reference: Outcome, again: Outcome, varying: Sequence[bool]) -> Refusal | None:
        """Add the run ``again``; why no replay can be judged by such runs, if they differ where no tolerance is."""
        if reference.drew_otherwise(again):
            return RANDOM_STATE
        unlike = reference.inexcusable(again, varying)
        if unlike is not None:
            return _unsteady(unlike)
        self.runs += 1
        surprises: _Surprises = {}
        for index in reference.differing(again):
            result, before = reference.results[index], self.distances.get(index)
            found = distance(result, again.results[index])
            if isinstance(found, str):
                return _unsteady(f"{reference.names[index]} {found}")
            surprise = found.surprise(before, result.dtype)
            if surprise is not None:
                _add(surprises, result.dtype, surprise)
            self.distances[index] = found.widened(before)
        if self.runs > RUNS[0]:  # those of the first series have too few before them
            self._surprises.append(surprises)
        return None

    def covers(self, total: _Surprises) -> bool:
        """True if runs allow a replay to lie outside of their spread by so much ``total``, in results of each type."""
        return all(
            any(run.get(kind, Surprise()).covers(surprise, kind) for run in self._surprises)
            for kind, surprise in total.items()
        )


def _unsteady(detail: str) -> Refusal:
    return Refusal("comparison-failed", f"non-deterministic: in another uncaptured run, {detail}")


# -- how far results may lie apart --------------------------------------------------------------------------------

BLOCK = 32
"""Neighbours that share a spread, at most. Blocks end with their row."""

SHORT = 8
"""Rows with fewer elements are not told apart: too few stand in for one another, and of a million rows some would be
refused."""

TERMS = 64
"""Tolerance in any case, in units of eps: re-ordered additions of n terms differ by about sqrt(n) · eps of the
largest partial sum, and 64 allows some 4,000 terms. The largest result of a block stands in for that sum."""

COARSE = 2.0**-5
"""No more than this part, or one eps if that is more, is allowed in any case. In bfloat16, 64 · eps is a half, and
hardly anything would be wrong; nobody keeps long sums in types as coarse."""

RARE = 1 / 16
"""Part of the blocks of a result that may be a surprise, so that one of fewer blocks has none."""

FACTOR = 4
"""How many times as far from the reference as the furthest of the other uncaptured runs a right replay may lie.

A right replay and the others are drawn alike. For one element with normal errors, with nothing allowed in any case, 4
refuses a right replay with a chance of 0.8 % after 3 runs, and of 5 in a million after 12, while what is wrong stays
outside, however often the region runs. Neighbours make that rarer still: of 2000 simulated sums of 200 bfloat16 numbers
in random order, each a tensor by itself, 8 were refused after 3 runs, and none after 12.
"""

_CHUNK = 1 << 22
"""Elements that are compared at a time, whole blocks: comparing takes memory of its own, several times theirs."""


@dataclass(frozen=True, slots=True)
class Surprise:
    """How far one run lies outside of what others allow, in results of one type: in how many ``blocks``, and by what
    ``part`` of their magnitudes at most."""

    blocks: int = 0
    part: float = 0.0

    def __add__(self, other: Surprise) -> Surprise:
        """Of two results together."""
        return Surprise(self.blocks + other.blocks, max(self.part, other.part))

    def covers(self, other: Surprise, dtype: torch.dtype) -> bool:
        """True if what this uncaptured run does allows what a replay (``other``) does."""
        part = min(FACTOR * self.part, COARSE - TERMS * torch.finfo(dtype).eps)
        return other.blocks <= FACTOR * self.blocks and other.part <= part


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two tensors lie apart: the largest absolute difference (``apart``) and the largest finite magnitude of
    the first of them (``magnitude``) in each block, in float64. Rows have ``width`` elements, and blocks go by rows."""

    apart: torch.Tensor
    magnitude: torch.Tensor
    width: int

    def widened(self, other: Distance | None) -> Distance:
        """This distance with at least the differences of ``other`` from the same reference."""
        return self if other is None else replace(self, apart=torch.maximum(self.apart, other.apart))

    def allowed(self, spread: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """How far another may lie from the same reference, in each block, where others are ``spread`` apart."""
        eps = torch.finfo(dtype).eps
        return FACTOR * spread + min(TERMS * eps, max(eps, COARSE)) * self.magnitude

    def excess(self, spread: Distance | None, dtype: torch.dtype) -> torch.Tensor:
        """How much further the other lies off than is allowed, in each block; no ``spread``: runs agree."""
        return self.apart - self.allowed(torch.zeros_like(self.apart) if spread is None else spread.apart, dtype)

    def surprise(self, spread: Distance | None, dtype: torch.dtype) -> Surprise | None:
        """How far the run of this distance lies outside of what the ``spread`` of others allows; None where it does so
        in too many blocks for a surprise."""
        if not self.apart.numel():
            return Surprise()
        excess = self.excess(spread, dtype)
        parts = (excess / self.magnitude)[excess > 0]
        return Surprise(len(parts), max(parts.tolist(), default=0.0)) if len(parts) <= RARE * len(excess) else None

    def outside(self, spread: Distance | None, dtype: torch.dtype) -> str | None:
        """Where and by how much the other lies further off than is allowed, if it does."""
        if not self.apart.numel():
            return None
        excess = self.excess(spread, dtype)
        at = int(excess.argmax())
        if float(excess[at]) <= 0:
            return None
        off, runs = float(self.apart[at]), 0.0 if spread is None else float(spread.apart[at])
        limit = off - float(excess[at])
        where = f"within {BLOCK} elements from {self.start(at)} on"
        return f"is off by {off:.2e} {where}, allowed are {limit:.2e} (uncaptured runs are {runs:.2e} apart)"

    def start(self, block: int) -> int:
        """The element that a block begins at."""
        row, column = divmod(block, -(-self.width // BLOCK))
        return row * self.width + column * BLOCK


_Surprises: TypeAlias = dict[torch.dtype, Surprise]
"""Of one run: in all results of a type."""


def _add(surprises: _Surprises, kind: torch.dtype, found: Surprise) -> None:
    surprises[kind] = found + surprises.get(kind, Surprise())


def distance(reference: torch.Tensor, other: torch.Tensor) -> Distance | str:
    """How far two tensors of one shape lie apart, or what no tolerance is for: integers and booleans that differ, a NaN
    or an infinity that only one of them has at its place, types without arithmetic. Any NaN equals any other."""
    try:
        return _distance(reference, other)
    except NotImplementedError:
        return "holds other values, of a type that has no arithmetic"


def _distance(reference: torch.Tensor, other: torch.Tensor) -> Distance | str:
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return "has another shape or dtype"
    nothing = reference.new_zeros(0, dtype=torch.float64)
    found: list[tuple[torch.Tensor, ...] | None] = [(nothing, nothing)]
    if reference.is_floating_point() or reference.is_complex():
        found += map(_of_block, _pieces(reference), _pieces(other))
    elif not torch.equal(reference, other):
        return "holds other integers"
    if None in found:
        return "has a NaN or an infinity at another place"
    apart, magnitude = map(torch.cat, zip(*filter(None, found), strict=True))
    return Distance(apart, magnitude, _width(reference))


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


def _of_block(reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The largest difference and magnitude in each block of two pieces; None where they are finite at different places,
    or infinite in different ways."""
    wide = torch.complex128 if reference.is_complex() else torch.float64
    expected, actual = reference.to(wide), other.to(wide)
    finite = torch.isfinite(expected) & torch.isfinite(actual)
    alike = (torch.isnan(expected) & torch.isnan(actual)) | (expected == actual)
    if not bool((finite | alike).all()):
        return None
    nothing = torch.zeros((), dtype=torch.float64, device=expected.device)
    return tuple(_by_block(torch.where(finite, each.abs(), nothing)) for each in (expected - actual, expected))


def _by_block(rows: torch.Tensor) -> torch.Tensor:
    """The maximum of each block of non-negative numbers."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK))
    return padded.view(rows.shape[0], -1, BLOCK).amax(-1).reshape(-1)
