"""Holding a replay against an uncaptured run: before the first replay, and on every call where that is asked for.

Whatever happens here, the caller's tensors see exactly one run, random state advances once, and the call is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pygraph.errors import ReplayError
from pygraph.runtime.digest import TOLERANCE, digest, same_bytes, span
from pygraph.runtime.driver import Driver, Executable
from pygraph.runtime.outcome import Outcome, difference, distance, observe, same_state
from pygraph.runtime.refusal import Refusal
from pygraph.runtime.snapshot import Block, Snapshot, blocks, take

__all__ = ["Scope", "Verdict", "compare", "rewind", "verify"]

Function = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Scope:
    """What a comparison has to know: arguments that may be ``written``, those whose storage offset is baked
    (``sensitive``), the ``budget`` in bytes for copies, and whether results may be close instead of equal."""

    written: frozenset[int]
    sensitive: frozenset[int]
    budget: int
    tolerant: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The uncaptured run's ``outputs``, which answer the call, and whether the replay may be used from now on."""

    outputs: Sequence[Any]
    refusal: Refusal | None
    tolerant: bool = False


def rewind(driver: Driver, state: object) -> None:
    """Bring a random state back if it changed, so that nobody else's draws are undone for nothing."""
    if not same_state(driver.snapshot_rng(), state):
        driver.restore_rng(state)


def compare(fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope) -> Verdict:
    """Replay on copies of ``args``, then run ``fn`` on ``args`` themselves, and hold one against the other.

    Equal bits of outputs, written arguments and random state, and equal structure, accept the replay. If they are
    unequal, ``fn`` runs again on copies: if it repeats its own result, the replay is wrong and refused
    (``comparison-failed``); if it does not, the region is non-deterministic and the replay is held to TOLERANCE.
    Raises what ``fn`` raises on ``args``, and ReplayError if the replay damaged an argument that it should only read
    and that was too large to copy.
    """
    trial: _Trial | None = None
    first: _First | Refusal
    try:
        trial = _Trial(fn, driver, executable, args, scope)
        first = trial.replay_on_copies()
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - kernels and allocations raise anything; the uncaptured run answers the call
        first = Refusal("replay-raised", f"{type(error).__name__}: {error}")
    outputs = fn(list(args))
    if trial is None or isinstance(first, Refusal):
        return Verdict(outputs, first if isinstance(first, Refusal) else None)
    try:
        return trial.judge(first, outputs)
    except Exception as error:  # noqa: BLE001 - the same; the call has its answer already
        return Verdict(outputs, Refusal("comparison-failed", f"{type(error).__name__}: {error}"))


def verify(
    fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope, name: str
) -> Sequence[Any] | None:
    """Answer a call by a replay that was compared with a run of ``fn`` on copies made before.

    None, with nothing changed, when there is no room for copies, when ``fn`` raises, or when the executable declines.
    Raises ReplayError, naming the region ``name`` and the output, when they differ.
    """
    trial = _Trial(fn, driver, executable, args, scope)
    if trial.over_budget:
        return None
    try:
        copies = take(args, trial.copied).args
        expected = fn(list(copies))
    except Exception:  # noqa: BLE001 - whatever it is, the uncaptured run on the real arguments raises it to the caller
        rewind(driver, trial.rng)
        return None
    reference = observe(expected, copies, trial.watched, driver.snapshot_rng())
    rewind(driver, trial.rng)
    if not scope.tolerant:
        expected, copies = (), []
    outputs = executable.replay(args)
    if outputs is None:
        return None
    if scope.tolerant:
        differs = distance(expected, outputs, (copies, args), trial.watched)
    else:
        differs = difference(reference, observe(outputs, args, trial.watched, driver.snapshot_rng()))
    if differs is not None:
        raise ReplayError(f"region {name}: a replay differs from an uncaptured run: {differs}")
    return outputs


@dataclass(frozen=True, slots=True)
class _First:
    """The compared replay's outcome; arguments of which nobody wrote the written ones; and those it ran on."""

    outcome: Outcome
    pristine: list[Any]
    copies: list[Any]


class _Trial:
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

    def replay_on_copies(self) -> _First | Refusal:
        """The replay that is judged. Random state is brought back; the caller's tensors are not written."""
        if self.over_budget:
            return Refusal("comparison-budget", f"copies of written arguments exceed {self.scope.budget} bytes")
        before = self._fingerprints()
        pristine = take(self.args, self.written).args
        working = take(self.args, self.copied)
        try:
            outputs = self.executable.replay(working.args)
            result = self._doubt(outputs, working) or _First(
                self._observe(outputs, working.args), pristine, working.args
            )
        finally:
            rewind(self.driver, self.rng)
            if self._fingerprints() != before:
                raise ReplayError("a replay wrote to an argument that it only reads, and that was too large to copy")
        return result

    def judge(self, first: _First, outputs: Sequence[Any]) -> Verdict:
        """Whether the replay did what the uncaptured run, which returned ``outputs``, did. Random state is kept."""
        reference = self._observe(outputs, self.args)
        if not self._unread_unchanged(first.copies):
            return Verdict(outputs, Refusal("comparison-failed", "an argument is written though no launch says so"))
        differs = difference(reference, first.outcome)
        if differs is None:
            return Verdict(outputs, None)
        try:
            return self._judge_again(first, outputs, reference, differs)
        finally:
            rewind(self.driver, reference.rng)

    def _judge_again(self, first: _First, outputs: Sequence[Any], reference: Outcome, differs: str) -> Verdict:
        """Whose fault a difference is: a wrong replay's, or the region's own, which then is held to a tolerance."""
        again = self._again(first)
        repeated = self._observe(self.fn(list(again)), again)
        if difference(reference, repeated) is None:
            return Verdict(outputs, Refusal("comparison-failed", f"replayed: {differs}"))
        again = self._again(first)
        replayed = self.executable.replay(again)
        if replayed is None:
            return Verdict(outputs, Refusal("replay-declined", "the second of two replays"))
        if not same_state(self.driver.snapshot_rng(), reference.rng):
            return Verdict(
                outputs, Refusal("comparison-failed", "replayed: the random state afterwards is another one")
            )
        far = distance(outputs, replayed, (self.args, again), self.watched)
        if far is None:
            return Verdict(outputs, None, tolerant=True)
        detail = f"non-deterministic, and {far} is off by more than {TOLERANCE} eps of its largest value"
        return Verdict(outputs, Refusal("comparison-failed", detail))

    def _observe(self, outputs: Sequence[Any] | None, args: Sequence[Any]) -> Outcome:
        return observe(outputs or (), args, self.watched, self.driver.snapshot_rng())

    def _again(self, first: _First) -> list[Any]:
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


def _nbytes(chosen: Sequence[Block]) -> int:
    return sum(block.nbytes for block in chosen)
