"""Decides whether a replay did what an uncaptured run did: pure functions of two outcomes.

    right when   a tensor of gradients that ``index_add_`` decides is off by the last bit, as between uncaptured runs
    wrong when   the same bit differs in any other result

Results that a non-deterministic launch decides have a tolerance; all others are compared by their bits. The replay must
be no further from the uncaptured run than uncaptured runs are from one another (``Spread``). That is judged block by
block: a block is up to BLOCK neighbours in a row, so that a large row does not hide a small one. In a block, an element
of the replay may be off by

    FACTOR · spread + min(TERMS · eps, COARSE) · magnitude

``spread`` is the largest difference between one uncaptured run and others, ``magnitude`` the largest magnitude in the
run that the replay is compared with, both within the block. The spread of one element is not reliable: a sum of few
terms may come out the same in three runs by chance. Its neighbours are similar sums, and stand in for missing runs.

Beyond that, a replay may differ from the runs as much as an uncaptured run differs from the runs before it
(``Surprise``). For example, a float32 gradient was rounded to bfloat16 on its way: one sum of a million, another one in
each run, is rounded the other way, by 2**-8 of its magnitude, where no other run shows a difference.

Only the first replay with its arguments is judged. A second one with the same arguments proves nothing: it is right
even if a replay returns what the one before it should have returned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from pygraph.runtime.provenance import Refusal

__all__ = ["ODD_REPLAY", "RANDOM_STATE", "RUNS", "Distance", "Outcome", "Spread", "Surprise", "distance", "judge"]

ODD_REPLAY = "odd-replay"
"""The refusal of a replay that lies outside of what uncaptured runs allow, in results which vary. A single outlier may
be chance, and may be the replay; two in a row hardly are."""

RANDOM_STATE = Refusal("random-state", "the random state afterwards is another one")
"""Two runs left different random states: they drew differently, or another thread drew."""

RUNS = (3, 9)
"""Further uncaptured runs of a region whose results vary: a first series, and a second one if the replay is not within
the spread of the first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effects of one run. Results are its outputs, and then the arguments that it may write.

    structure: all facts of each output except its values, and whose memory it uses
    contents: fingerprint of the bits of each result; empty if they may be anything
    names: names of the results
    rng: state of the generator from which it drew, if it did
    results: the results themselves, where bits may not decide
    """

    structure: tuple[Hashable, ...]
    contents: tuple[bytes, ...]
    names: tuple[str, ...]
    rng: torch.Tensor | None
    results: list[Any] = field(compare=False)

    def differing(self, other: Outcome) -> list[int]:
        """Indices of the results whose bits differ between two runs of one structure."""
        return [i for i, (mine, theirs) in enumerate(zip(self.contents, other.contents, strict=True)) if mine != theirs]

    def other_structure(self, other: Outcome) -> str | None:
        """The first difference of ``other`` that is not one of values."""
        if len(self.structure) != len(other.structure):
            return f"{len(other.structure)} outputs instead of {len(self.structure)}"
        if len(self.contents) != len(other.contents):
            return "another number of operators is called"
        pairs = zip(self.names, self.structure, other.structure, strict=False)
        return next((f"{name} is {theirs} instead of {mine}" for name, mine, theirs in pairs if mine != theirs), None)

    def inexcusable(self, other: Outcome, varying: Sequence[bool]) -> str | None:
        """The first difference in structure, or else in a result that is not ``varying``."""
        differs = self.other_structure(other)
        if differs is not None:
            return differs
        wrong = next((index for index in self.differing(other) if not varying[index]), None)
        return None if wrong is None else f"{self.names[wrong]} has other values"

    def drew_otherwise(self, other: Outcome) -> bool:
        """True if two runs left different random states: they drew differently, or another thread drew."""
        return self.rng is not None and other.rng is not None and not torch.equal(self.rng, other.rng)


def judge(
    expected: Outcome, actual: Outcome, varying: Sequence[bool], spread: Spread, *, tolerant: bool = False
) -> Refusal | None:
    """Reason why a replay with the outcome ``actual`` may not be used, if an uncaptured run has the one ``expected``.

    varying: for each result, true if a launch that is known to be non-deterministic decides it
    spread: spread of the uncaptured runs made so far, maybe of none
    tolerant: results on which those runs agree have a tolerance, too, since it was needed before

    More runs may turn ``odd-replay`` into another answer, but no other refusal.
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
    """Differences of uncaptured runs from a reference run on the same arguments and random numbers.

    distances: the largest distances of each result in which any run differed
    runs: number of runs, without the reference
    """

    def __init__(self) -> None:
        self.distances: dict[int, Distance] = {}
        self.runs = 0
        self._surprises: list[_Surprises] = []

    def widen(self, reference: Outcome, again: Outcome, varying: Sequence[bool]) -> Refusal | None:
        """Add the run ``again``. Returns a refusal of any replay if the runs differ where there is no tolerance."""
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
        """True if the runs allow a replay to lie outside of their spread by ``total``, in results of each type."""
        return all(
            any(run.get(kind, Surprise()).covers(surprise, kind) for run in self._surprises)
            for kind, surprise in total.items()
        )


def _unsteady(detail: str) -> Refusal:
    return Refusal("comparison-failed", f"non-deterministic: in another uncaptured run, {detail}")


# -- how far results may lie apart --------------------------------------------------------------------------------

BLOCK = 32
"""Maximum number of neighbours that share a spread. Blocks end with their row."""

SHORT = 8
"""Rows with fewer elements are joined: too few would stand in for one another, and some of a million rows would be
refused."""

TERMS = 64
"""Minimum tolerance, in units of eps: re-ordered additions of n terms differ by about sqrt(n) · eps of the
largest partial sum, and 64 allows some 4,000 terms. The largest result of a block stands in for that sum."""

COARSE = 2.0**-5
"""Limit of the minimum tolerance, as a fraction of the magnitude, unless one eps is more. In bfloat16, 64 · eps is a
half, and would accept nearly anything; nobody keeps long sums in types as coarse."""

RARE = 1 / 16
"""Fraction of the blocks of a result that may be a surprise; so a result of fewer than 16 blocks has none."""

FACTOR = 4
"""A right replay may lie this many times as far from the reference as the furthest of the other uncaptured runs.

A right replay and the others have the same distribution. For one element with normal errors and no minimum tolerance, 4
refuses a right replay with a probability of 0.8 % after 3 runs, and of 5 in a million after 12. A wrong one stays
outside, however often the region runs. Neighbours make refusals rarer still: of 2000 simulated sums of 200 bfloat16
numbers in random order, each a tensor by itself, 8 were refused after 3 runs, and none after 12.
"""

_CHUNK = 1 << 22
"""Elements that are compared at a time, in whole blocks: comparing takes several times their memory in addition."""


@dataclass(frozen=True, slots=True)
class Surprise:
    """Excess of one run over the differences that others allow, in results of one type: the number of ``blocks``, and
    the largest excess as a ``part`` of a block's magnitude."""

    blocks: int = 0
    part: float = 0.0

    def __add__(self, other: Surprise) -> Surprise:
        """Surprise of two results together."""
        return Surprise(self.blocks + other.blocks, max(self.part, other.part))

    def covers(self, other: Surprise, dtype: torch.dtype) -> bool:
        """True if the surprise of this uncaptured run allows that of a replay (``other``)."""
        part = min(FACTOR * self.part, COARSE - TERMS * torch.finfo(dtype).eps)
        return other.blocks <= FACTOR * self.blocks and other.part <= part


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of two tensors: the largest absolute difference (``apart``) and the largest finite magnitude in the
    first tensor (``magnitude``) of each block, in float64. Rows have ``width`` elements; no block spans two rows."""

    apart: torch.Tensor
    magnitude: torch.Tensor
    width: int

    def widened(self, other: Distance | None) -> Distance:
        """This distance with at least the differences of ``other`` from the same reference."""
        return self if other is None else replace(self, apart=torch.maximum(self.apart, other.apart))

    def allowed(self, spread: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Difference from the same reference that a tensor may have, in each block, given the ``spread`` of others."""
        eps = torch.finfo(dtype).eps
        return FACTOR * spread + min(TERMS * eps, max(eps, COARSE)) * self.magnitude

    def excess(self, spread: Distance | None, dtype: torch.dtype) -> torch.Tensor:
        """Difference beyond the allowed one, in each block. No ``spread``: the runs agree."""
        return self.apart - self.allowed(torch.zeros_like(self.apart) if spread is None else spread.apart, dtype)

    def surprise(self, spread: Distance | None, dtype: torch.dtype) -> Surprise | None:
        """Excess of the run with this distance over the difference that the ``spread`` of others allows; None if too
        many blocks exceed it for a surprise."""
        if not self.apart.numel():
            return Surprise()
        excess = self.excess(spread, dtype)
        parts = (excess / self.magnitude)[excess > 0]
        return Surprise(len(parts), max(parts.tolist(), default=0.0)) if len(parts) <= RARE * len(excess) else None

    def outside(self, spread: Distance | None, dtype: torch.dtype) -> str | None:
        """Text on where, and by how much, the difference exceeds the allowed one, if it does."""
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
        """Index of the first element of a block."""
        row, column = divmod(block, -(-self.width // BLOCK))
        return row * self.width + column * BLOCK


_Surprises: TypeAlias = dict[torch.dtype, Surprise]
"""Surprises of one run, by type of the results."""


def _add(surprises: _Surprises, kind: torch.dtype, found: Surprise) -> None:
    surprises[kind] = found + surprises.get(kind, Surprise())


def distance(reference: torch.Tensor, other: torch.Tensor) -> Distance | str:
    """Distance of two tensors of one shape, or text on a difference without tolerance: integers and booleans that
    differ, a NaN or an infinity that only one has at its place, a type without arithmetic. Any NaN equals any other."""
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
    """The elements of ``tensor`` by rows, in pieces of at most _CHUNK elements. No block spans two pieces."""
    if not tensor.numel():
        return
    rows = tensor.detach().reshape(-1, _width(tensor))
    for some in rows.split(max(1, _CHUNK // rows.shape[1])):
        yield from some.split(_CHUNK, 1)


def _of_block(reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The largest difference and magnitude in each block of two pieces; None if they are finite at different places, or
    infinite in different ways."""
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
