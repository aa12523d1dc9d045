"""The runs of one comparison, the memory that they take, and what is found when one is held against another.

In which order they are made, what they are made for, and what raises, is ``comparison``'s subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pygraph.errors import ReplayError
from pygraph.runtime.digest import digest, same_bytes, span
from pygraph.runtime.divergence import Finding, Suspect, diagnose
from pygraph.runtime.driver import Driver, Executable, Program
from pygraph.runtime.outcome import Outcome, difference, observe, results, same_state
from pygraph.runtime.refusal import Refusal
from pygraph.runtime.snapshot import Block, Snapshot, blocks, take
from pygraph.runtime.tolerance import RUNS, Spread, Unlike, beyond, repeats, unrepeated, widened

__all__ = ["Expected", "First", "Function", "Scope", "Trial", "Verdict", "rewind"]

Function = Callable[[list[Any]], Sequence[Any]]

_UNSTEADY, _ANOTHER_RUN = "non-deterministic: ", "in another uncaptured run"


@dataclass(frozen=True, slots=True)
class Scope:
    """What a comparison has to know: arguments that may be ``written``, those whose storage offset is baked
    (``sensitive``), the ``budget`` in bytes for copies, the ``spread`` that was found, where the region does not
    repeat itself, and the ``program`` in which the launch that differs is looked for, if it is to be."""

    written: frozenset[int]
    sensitive: frozenset[int]
    budget: int
    spread: Spread | None = None
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The uncaptured run's ``outputs``, which answer the call, and whether the replay may be used from now on.

    ``spread`` is that of a region which does not repeat itself.
    """

    outputs: Sequence[Any]
    refusal: Refusal | None
    spread: Spread | None = None


def rewind(driver: Driver, state: object) -> None:
    """Bring a random state back if it changed, so that nobody else's draws are undone for nothing."""
    if not same_state(driver.snapshot_rng(), state):
        driver.restore_rng(state)


@dataclass(frozen=True, slots=True)
class First:
    """The compared replay's outcome; arguments of which nobody wrote the written ones; and those it ran on, until they
    are let go of."""

    outcome: Outcome
    pristine: list[Any]
    copies: list[Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """An uncaptured run's outcome, and what it left, where bits alone will not tell; arguments of which nobody wrote
    the written ones, where a launch may have to be looked for."""

    outcome: Outcome
    results: list[Any]
    pristine: list[Any] = field(default_factory=list)


class Trial:
    """One comparison: the memory involved, and the runs made on it."""

    def __init__(self, fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope) -> None:
        self.fn, self.driver, self.executable, self.args, self.scope = fn, driver, executable, args, scope
        self.rng = driver.snapshot_rng()
        every = blocks(args, scope.sensitive)
        self.written = tuple(b for b in every if scope.written.intersection(b.members))
        self.watched = [p for b in self.written for p in b.members]
        saved, full = _nbytes(self.written), _nbytes(every)
        self.all_copied = saved + full <= scope.budget
        self.copied = every if self.all_copied else self.written
        self.over_budget = not self.all_copied and 2 * saved > scope.budget
        self.read_in_place = [] if self.all_copied else [p for b in every if b not in self.written for p in b.members]

    # -- before the first replay ----------------------------------------------------------------------------------

    def replay_on_copies(self) -> First | Refusal:
        """The replay that is judged. Random state is brought back; the caller's tensors are not written."""
        if self.over_budget:
            return Refusal("comparison-budget", f"copies of written arguments exceed {self.scope.budget} bytes")
        before = self._fingerprints()
        pristine = take(self.args, self.written).args
        working = take(self.args, self.copied)
        try:
            outputs = self.executable.replay(working.args)
            result = self._doubt(outputs, working) or First(
                self._observe(outputs, working.args), pristine, working.args
            )
        finally:
            rewind(self.driver, self.rng)
            if self._fingerprints() != before:
                raise ReplayError("a replay wrote to an argument that it only reads, and that was too large to copy")
        return result

    def judge(self, first: First, outputs: Sequence[Any]) -> Verdict:
        """Whether the replay did what the uncaptured run, which returned ``outputs``, did. Random state is kept."""
        reference = self._observe(outputs, self.args)
        if not self._unread_unchanged(first.copies):
            return Verdict(outputs, Refusal("comparison-failed", "an argument is written though no launch says so"))
        first.copies.clear()
        differs = difference(reference, first.outcome)
        if differs is None:
            return Verdict(outputs, None)
        unlike = difference(reference, first.outcome, values=False)
        if unlike is not None:
            return Verdict(outputs, Refusal("comparison-failed", f"replayed: {unlike}"))
        try:
            found = self._judge_again(first, outputs, reference)
        finally:
            rewind(self.driver, reference.rng)
        if not isinstance(found, Refusal):
            return Verdict(outputs, None, found)
        return Verdict(outputs, found)

    def _judge_again(self, first: First, outputs: Sequence[Any], reference: Outcome) -> Spread | Refusal:
        """Whose fault a difference in values is: a wrong replay's, or the region's own, which has a spread then."""
        left = results(outputs, self.args, self.watched)
        spread: Spread = (None,) * len(left)
        for _ in range(RUNS):
            wider = self._run_again(first, left, reference, spread)
            if isinstance(wider, Refusal):
                return wider
            spread = wider
        if repeats(spread):
            return Refusal("comparison-failed", f"replayed: {difference(reference, first.outcome)}")
        wrong = unrepeated(spread, reference.equal(first.outcome))
        if wrong is not None:
            return _unsteady(f"{reference.name(wrong.index)} {wrong.how}")
        return self._replay_again(first, left, reference, spread)

    def _run_again(self, first: First, left: list[Any], reference: Outcome, spread: Spread) -> Spread | Refusal:
        """``spread`` with one more uncaptured run, on copies, held against what the first one ``left``."""
        copies = self._again(first)
        outputs = self.fn(list(copies))
        outcome = self._observe(outputs, copies)
        unlike = difference(reference, outcome, values=False)
        if unlike is not None:
            return _unsteady(f"{_ANOTHER_RUN}, {unlike}")
        found = widened(spread, left, results(outputs, copies, self.watched), reference.equal(outcome))
        if isinstance(found, Unlike):
            return _unsteady(f"{_ANOTHER_RUN}, {reference.name(found.index)} {found.how}")
        return found

    def _replay_again(self, first: First, left: list[Any], reference: Outcome, spread: Spread) -> Spread | Refusal:
        """``spread``, if another replay on copies lies within it."""
        copies = self._again(first)
        outputs = self.executable.replay(copies)
        if outputs is None:
            return Refusal("replay-declined", "the second of two replays")
        unlike = self._beyond(Expected(reference, left), outputs, copies, spread)
        return spread if unlike is None else _unsteady(unlike)

    # -- on every call --------------------------------------------------------------------------------------------

    def run_on_copies(self) -> Expected | None:
        """What an uncaptured run does; None where it raises. Random state is brought back."""
        try:
            pristine = [] if self.scope.program is None else take(self.args, self.written).args
            copies = take(self.args, self.copied).args
            outputs = self.fn(list(copies))
        except Exception:  # noqa: BLE001 - whatever it is, the uncaptured run on the real arguments raises it to the caller
            rewind(self.driver, self.rng)
            return None
        outcome = self._observe(outputs, copies)
        rewind(self.driver, self.rng)
        kept = [] if self.scope.spread is None else results(outputs, copies, self.watched)
        return Expected(outcome, kept, pristine)

    def unlike(self, expected: Expected, outputs: Sequence[Any]) -> str | None:
        """In what a replay on the caller's own arguments differs from an uncaptured run."""
        if self.scope.spread is None:
            return difference(expected.outcome, self._observe(outputs, self.args))
        return self._beyond(expected, outputs, self.args, self.scope.spread)

    # -- either ---------------------------------------------------------------------------------------------------

    def explained(self, refusal: Refusal, pristine: list[Any]) -> Refusal:
        """``refusal`` with the launch that differs, if it is about a wrong replay of ``pristine`` arguments."""
        unsteady = refusal.detail.startswith(_UNSTEADY) and _ANOTHER_RUN not in refusal.detail
        if refusal.reason != "replay-raised" and not unsteady and not refusal.detail.startswith("replayed: "):
            return refusal
        found = self.diagnosed(pristine, tolerant=unsteady)
        return refusal if found is None else found.added_to(refusal)

    def diagnosed(self, pristine: list[Any], *, tolerant: bool) -> Finding | None:
        """The launch in which a replay differs. Not to be called within transient memory: it may capture."""
        scope = self.scope
        return diagnose(
            Suspect(self.fn, self.driver, scope.program, pristine, self.rng, scope.budget, scope.sensitive, tolerant)
        )

    def _beyond(self, expected: Expected, outputs: Sequence[Any], args: list[Any], spread: Spread) -> str | None:
        """In what a replay differs by more than ``spread`` allows."""
        outcome = self._observe(outputs, args)
        unlike = difference(expected.outcome, outcome, values=False)
        if unlike is not None:
            return f"replayed: {unlike}"
        left = results(outputs, args, self.watched)
        found = beyond(spread, expected.results, left, expected.outcome.equal(outcome))
        return None if found is None else f"{outcome.name(found.index)} {found.how}"

    def _observe(self, outputs: Sequence[Any] | None, args: Sequence[Any]) -> Outcome:
        return observe(outputs or (), args, self.watched, self.driver.snapshot_rng())

    def _again(self, first: First) -> list[Any]:
        """Fresh copies of the arguments as they were before any run, and the random state of then."""
        rewind(self.driver, self.rng)
        every = blocks(first.pristine, self.scope.sensitive)
        wanted = [b for b in every if self.all_copied or set(b.members).intersection(self.watched)]
        return take(first.pristine, wanted).args

    def _doubt(self, outputs: Sequence[Any] | None, working: Snapshot) -> Refusal | None:
        """What is wrong with a replay whatever its results."""
        if outputs is None:
            return Refusal("replay-declined", "the arguments that were captured do not match")
        if not working.intact:
            return Refusal("comparison-failed", "replayed: bytes beside an argument were written")
        if not self._unread_unchanged(working.args):
            return Refusal("comparison-failed", "replayed: an argument is written though no launch says so")
        return None

    def _unread_unchanged(self, copies: list[Any]) -> bool:
        """Whether copied arguments that no launch writes still hold what the caller's tensors hold."""
        pairs = ((a, b) for a, b in zip(self.args, copies, strict=True) if a is not b)
        skip = {id(self.args[p]) for p in self.watched}
        return all(same_bytes(a, b) for a, b in pairs if id(a) not in skip)

    def _fingerprints(self) -> list[bytes]:
        return [digest(span(self.args[p])) for p in self.read_in_place]


def _unsteady(detail: str) -> Refusal:
    return Refusal("comparison-failed", f"{_UNSTEADY}{detail}")


def _nbytes(chosen: Sequence[Block]) -> int:
    return sum(block.nbytes for block in chosen)
