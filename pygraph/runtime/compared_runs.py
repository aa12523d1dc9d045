"""The runs of one comparison, the memory that they take, and what is found when one is held against another.

In which order they are made, what they are made for, and what raises, is ``comparison``'s subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pygraph.errors import ReplayError
from pygraph.runtime.driver import Driver, Executable, Program
from pygraph.runtime.generators import Draws
from pygraph.runtime.nondeterminism import AGREED, RUNS, Spread, Unlike, beyond, shares, unrepeatable, widened
from pygraph.runtime.outcome import Outcome, difference, moved_on, observe, results
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.tensors import Block, Snapshot, blocks, digest, same_bytes, span, take

if TYPE_CHECKING:
    from pygraph.debug.diagnose import Finding

__all__ = ["Expected", "First", "Function", "Scope", "Trial", "Verdict"]

Function = Callable[[list[Any]], Sequence[Any]]

_UNSTEADY, _ANOTHER_RUN = "non-deterministic: ", "in another uncaptured run"


@dataclass(frozen=True, slots=True)
class Scope:
    """What a comparison has to know: arguments that may be ``written``, those whose storage offset is baked
    (``sensitive``), the ``budget`` in bytes for copies, the ``spread`` that was found, where the region does not
    repeat itself, and the ``program`` that is replayed. Without a program, nothing is tolerated, and no launch is
    looked for."""

    written: frozenset[int]
    sensitive: frozenset[int]
    budget: int
    spread: Spread | None = None
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The uncaptured run's ``outputs``, which answer the call, and whether the replay may be used from now on.

    ``spread`` is that of a region which does not repeat itself. ``runs`` counts the uncaptured runs besides the one
    that answers the call.
    """

    outputs: Sequence[Any]
    refusal: Refusal | None
    spread: Spread | None = None
    runs: int = 0


@dataclass(frozen=True, slots=True)
class First:
    """The compared replay's outcome; arguments of which nobody wrote the written ones; and those it ran on, until they
    are let go of."""

    outcome: Outcome
    pristine: list[Any]
    copies: list[Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """A run's outcome, and what it left, where bits alone will not tell."""

    outcome: Outcome
    results: list[Any]


class Trial:
    """One comparison: the memory involved, and the runs made on it."""

    def __init__(self, fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope) -> None:
        self.fn, self.driver, self.executable, self.args, self.scope = fn, driver, executable, args, scope
        self.random = Draws(driver, scope.program)
        self.rng = self.random.state()
        self.replaying = False
        every = blocks(args, scope.sensitive)
        self.written = tuple(b for b in every if scope.written.intersection(b.members))
        self.watched = [p for b in self.written for p in b.members]
        saved, full = _nbytes(self.written), _nbytes(every)
        self.all_copied = saved + full <= scope.budget
        self.copied = every if self.all_copied else self.written
        self.over_budget = not self.all_copied and 2 * saved > scope.budget
        self.runs = 0
        self.read_in_place = [] if self.all_copied else [p for b in every if b not in self.written for p in b.members]

    # -- before the first replay ----------------------------------------------------------------------------------

    def replay_on_copies(self) -> First | Refusal:
        """The replay that is judged. Its draws are undone; the caller's tensors are not written."""
        if self.over_budget:
            return Refusal("comparison-budget", f"copies of written arguments exceed {self.scope.budget} bytes")
        before = self._fingerprints()
        pristine = take(self.args, self.written).args
        working = take(self.args, self.copied)
        undone = False
        try:
            try:
                outputs = self._replay(working.args)
            finally:
                undone = self.random.undo()
            outcome = self._observe(outputs, working.args, self.random.end)
            result = self._doubt(outputs, working) or First(outcome, pristine, working.args)
        finally:
            if self._fingerprints() != before:
                raise ReplayError("a replay wrote to an argument that it only reads, and that was too large to copy")
        return result if undone else Refusal("random-state", "another thread drew from the generator of the replay")

    def judge(self, first: First, outputs: Sequence[Any]) -> Verdict:
        """Whether the replay did what the uncaptured run, which returned ``outputs``, did. Random state is kept."""
        reference = self._observe(outputs, self.args, self.random.state())
        if not self._unread_unchanged(first.copies):
            return Verdict(outputs, Refusal("comparison-failed", "an argument is written though no launch says so"))
        first.copies.clear()
        moved = moved_on(reference, first.outcome)
        if moved is not None:
            return Verdict(outputs, Refusal("random-state", moved))
        if difference(reference, first.outcome) is None:
            return Verdict(outputs, None)
        wrong = difference(reference, first.outcome, values=False) or self._undecided(reference, first.outcome)
        if wrong is not None:
            return Verdict(outputs, self._wrong(f"replayed: {wrong}"))
        with self.random.apart():
            verdict = self._judge_again(first, outputs, reference)
        return replace(verdict, runs=self.runs)

    def _wrong(self, detail: str) -> Refusal:
        """A replay differs where it must not. Operators written in Python are suspected first: what they keep for
        themselves, a replay repeats."""
        calls = () if self.scope.program is None else self.scope.program.recording.python
        if not calls:
            return Refusal("comparison-failed", detail)
        nodes = tuple(dict.fromkeys(node for call in calls for node in call.nodes))
        names = " or ".join(dict.fromkeys(call.name for call in calls))
        said = f"{detail}; written in Python, and so perhaps with a state of its own: {names}"
        return Refusal("stateful-operator", said, names, calls[0].loc if len(calls) == 1 else None, nodes)

    def _decided(self, outcome: Outcome) -> list[bool]:
        """For each result, whether a launch that is known to be non-deterministic decides it. Where it is not known
        what the outputs are, any such launch may decide each of them."""
        if self.scope.program is None:
            return [False] * len(outcome.equal(outcome))
        recording = self.scope.program.recording
        decided = unrepeatable(recording, self.scope.program.slots)
        anything = any(launch.nondeterministic for launch in recording.launches)
        known = len(recording.outputs) == len(outcome.contents)
        outputs = [decided(each) for each in recording.outputs] if known else [anything] * len(outcome.contents)
        return [*outputs, *(decided(position) for position in outcome.arguments)]

    def _undecided(self, reference: Outcome, other: Outcome) -> str | None:
        """The first result in which two runs differ, and that no launch decides which is known to be
        non-deterministic."""
        equal, decided = reference.equal(other), self._decided(reference)
        wrong = (i for i, (same, may) in enumerate(zip(equal, decided, strict=True)) if not (same or may))
        index = next(wrong, None)
        return None if index is None else f"{reference.name(index)} has other values"

    def _judge_again(self, first: First, outputs: Sequence[Any], reference: Outcome) -> Verdict:
        """Whose fault a difference in values is: a wrong replay's, or the region's own, which has a spread then.

        Where the region draws, runs on the numbers of the answering one would have other threads draw them, too. Each
        round replays anew: where a rounding error decides a sign, one run of many is further off than all others, and
        that may be the replay. A wrong replay is further off each time.
        """
        left = Expected(reference, results(outputs, self.args, self.watched))
        left = self._uncaptured_again(first) if self.random else left
        spread: Spread = (None,) * len(left.results)
        seen = [first.outcome]
        unlike: str | None = None
        for runs in RUNS:
            for _ in range(runs):
                wider = self._run_again(first, left, spread)
                if isinstance(wider, Refusal):
                    return Verdict(outputs, wider)
                spread = wider
            replayed = self._replay_again(first)
            if replayed is None:
                return Verdict(outputs, Refusal("replay-declined", "the second of two replays"))
            moved = moved_on(left.outcome, replayed.outcome)
            if moved is not None:
                return Verdict(outputs, Refusal("random-state", moved))
            seen.append(replayed.outcome)
            unlike = self._unrepeated(seen, reference, spread) or self._beyond(left, replayed, spread)
            if unlike is None:
                return Verdict(outputs, None, shares(spread))
        if all(part is None for part in spread):
            return Verdict(outputs, Refusal("comparison-failed", f"replayed: {difference(reference, first.outcome)}"))
        return Verdict(outputs, _unsteady(str(unlike)), shares(spread))

    def _run_again(self, first: First, left: Expected, spread: Spread) -> Spread | Refusal:
        """``spread`` with one more uncaptured run, on copies, held against what the first one ``left``."""
        again = self._uncaptured_again(first)
        reference, outcome = left.outcome, again.outcome
        moved = moved_on(reference, outcome)
        if moved is not None:
            return Refusal("random-state", moved)
        unlike = difference(reference, outcome, values=False) or self._undecided(reference, outcome)
        if unlike is not None:
            return _unsteady(f"{_ANOTHER_RUN}, {unlike}")
        found = widened(spread, left.results, again.results, reference.equal(outcome))
        if isinstance(found, Unlike):
            return _unsteady(f"{_ANOTHER_RUN}, {reference.name(found.index)} {found.how}")
        return found

    def _uncaptured_again(self, first: First) -> Expected:
        """Another uncaptured run, on copies."""
        copies = self._retaken(first).args
        self.runs += 1
        return self._left(self.fn(list(copies)), copies)

    def _replay_again(self, first: First) -> Expected | None:
        """Another replay, on copies; None where it declines."""
        copies = self._retaken(first).args
        outputs = self._replay(copies)
        return None if outputs is None else self._left(outputs, copies)

    def _replay(self, args: list[Any]) -> Sequence[Any] | None:
        """A replay; while one raises, and from then on, ``replaying`` says so."""
        self.replaying = True
        outputs = self.executable.replay(args)
        self.replaying = False
        return outputs

    def _left(self, outputs: Sequence[Any], args: list[Any]) -> Expected:
        """What a run returned, and left behind in ``args`` and in the generator."""
        state = self.random.state()
        return Expected(self._observe(outputs, args, state), results(outputs, args, self.watched))

    def _unrepeated(self, seen: Sequence[Outcome], reference: Outcome, spread: Spread) -> str | None:
        """The first result that uncaptured runs repeat, and a replay that was ``seen`` does not."""
        for outcome in seen:
            for index, same in enumerate(reference.equal(outcome)):
                if spread[index] is None and not same:
                    return f"{reference.name(index)} {AGREED}"
        return None

    # -- on every call --------------------------------------------------------------------------------------------

    def run_on_copies(self) -> Expected | None:
        """What an uncaptured run does; None where another thread drew from its generator. Its draws are undone. Raises
        what the run raises."""
        copies = take(self.args, self.copied).args
        try:
            outputs = self.fn(list(copies))
        finally:
            undone = self.random.undo()
        if not undone:
            return None
        outcome = self._observe(outputs, copies, self.random.end)
        kept = results(outputs, copies, self.watched) if any(self._decided(outcome)) else []
        return Expected(outcome, kept)

    def unlike(self, expected: Expected, outputs: Sequence[Any], *, loosely: bool = False) -> str | None:
        """In what a replay on the caller's own arguments differs from an uncaptured run."""
        decided = self._decided(expected.outcome)
        found: Spread = self.scope.spread or (None,) * len(decided)
        spread = [(part or 0.0) if may else None for part, may in zip(found, decided, strict=True)]
        replayed = self._left(outputs, self.args)
        return moved_on(expected.outcome, replayed.outcome) or self._beyond(expected, replayed, spread, loosely=loosely)

    # -- either ---------------------------------------------------------------------------------------------------

    def explained(self, verdict: Verdict) -> Verdict:
        """``verdict`` with the launch that differs, if it refuses a replay as wrong."""
        refusal = verdict.refusal
        if refusal is None or not _about_values(refusal):
            return verdict
        found = self.diagnosed()
        return verdict if found is None else replace(verdict, refusal=found.added_to(refusal))

    def diagnosed(self) -> Finding | None:
        """The launch in which a replay differs. Not to be called within transient memory: it captures. Not looked for
        where that would run the body of an operator that is written in Python."""
        program = self.scope.program
        if program is None or program.recording.python:
            return None
        from pygraph.debug.diagnose import diagnose  # needed only where something differs

        return diagnose(self.fn, self.driver, program, self.args)

    def near(self, expected: Expected, outputs: Sequence[Any]) -> bool:
        """Whether a replay on the caller's own arguments is close to an uncaptured run as a whole."""
        return self.unlike(expected, outputs, loosely=True) is None

    def _beyond(self, expected: Expected, replayed: Expected, spread: Spread, *, loosely: bool = False) -> str | None:
        """In what a replay differs by more than ``spread`` allows."""
        reference, outcome = expected.outcome, replayed.outcome
        unlike = difference(reference, outcome, values=False) or self._undecided(reference, outcome)
        if unlike is not None:
            return unlike
        equal = reference.equal(outcome)
        found = None if all(equal) else beyond(spread, expected.results, replayed.results, equal, loosely=loosely)
        return None if found is None else f"{outcome.name(found.index)} {found.how}"

    def _observe(self, outputs: Sequence[Any] | None, args: Sequence[Any], state: torch.Tensor | None) -> Outcome:
        return observe(outputs or (), args, self.watched, state)

    def _retaken(self, first: First) -> Snapshot:
        """Fresh copies of the arguments as they were before any run, and the first of the numbers ``apart``."""
        self.random.restart()
        every = blocks(first.pristine, self.scope.sensitive)
        wanted = [b for b in every if self.all_copied or set(b.members).intersection(self.watched)]
        return take(first.pristine, wanted)

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


def _about_values(refusal: Refusal) -> bool:
    """Whether a refusal says that a replay went wrong, and not that uncaptured runs cannot be compared."""
    if refusal.reason == "replay-raised" or refusal.detail.startswith("replayed: "):
        return True
    return refusal.detail.startswith(_UNSTEADY) and _ANOTHER_RUN not in refusal.detail


def _unsteady(detail: str) -> Refusal:
    return Refusal("comparison-failed", f"{_UNSTEADY}{detail}")


def _nbytes(chosen: Sequence[Block]) -> int:
    return sum(block.nbytes for block in chosen)
