"""Compares a replay with an uncaptured run: before a program is first used, and on every call where that is asked for.

    compare, before the first use              verify, on every call
    1. replay on copies of the arguments       1. run uncaptured on copies of the arguments
    2. run uncaptured: the call's answer       2. replay: the call's answer
    3. hold the outcomes against each other    3. hold the outcomes against each other

The caller's tensors see exactly one run, random state advances once, and the call is answered, whatever is found.
Outcomes are compared by structure and by bits. Where bits differ only in results that a non-deterministic launch
decides, the function runs some more times on copies, and a replay must be as close as those runs are to one another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pygraph.errors import ReplayError
from pygraph.runtime.contract import Driver, Executable, Program, ScratchPool
from pygraph.runtime.nondeterminism import AGREED, RUNS, Spread, Unlike, beyond, shares, unrepeatable, widened
from pygraph.runtime.provenance import Refusal, is_out_of_memory
from pygraph.runtime.tensors import Block, Snapshot, bits, blocks, digest, extent, same_bytes, span, take

if TYPE_CHECKING:
    from pygraph.debug.diagnose import Finding

__all__ = ["Scope", "Verdict", "compare", "observe", "verify"]

Function = Callable[[list[Any]], Sequence[Any]]

_WRONG = ("comparison-failed", "replay-raised")
"""Refusals that a launch of the replay may be to blame for."""


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
    that answers the call. Not ``comparable``: these runs are too unlike to hold a replay against them.
    """

    outputs: Sequence[Any]
    refusal: Refusal | None
    spread: Spread | None = None
    runs: int = 0
    comparable: bool = True


@dataclass(frozen=True, slots=True)
class _First:
    """The compared replay's outcome; arguments of which nobody wrote the written ones; and those it ran on, until they
    are let go of."""

    outcome: _Outcome
    pristine: list[Any]
    copies: list[Any]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run's outcome, and what it left, where bits alone will not tell."""

    outcome: _Outcome
    results: list[Any]


# -- the two comparisons ----------------------------------------------------------------------------------------------


def compare(fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope) -> Verdict:
    """Replay on copies of ``args``, then run ``fn`` on ``args`` themselves, and hold one against the other.

    Equal bits of outputs, written arguments and random state, and equal structure, accept the replay. Unequal values
    refuse it (``comparison-failed``, or ``stateful-operator`` where operators are written in Python), unless launches
    that are known to be non-deterministic decide them. Then ``fn`` runs RUNS times more on copies, and a replay is held
    to what uncaptured runs differ by. Another random state refuses the replay this time (``random-state``): another
    thread may have drawn.

    All but the run that answers the call uses the driver's scratch memory, or, where that has no room beside what the
    allocator keeps for later, ordinary memory. Raises what ``fn`` raises on ``args``, and ReplayError if the replay
    damaged an argument that it should only read and that was too large to copy, or if the random state could not be
    brought back.
    """
    with driver.scratch_pool(args) as scratch:
        verdict = _compare(fn, driver, executable, args, scope, scratch)
    if isinstance(verdict, Refusal):
        verdict = _compare(fn, driver, executable, args, scope, contextlib.nullcontext)
    if not isinstance(verdict, Refusal):
        return verdict
    return Verdict(fn(list(args)), verdict)


def _compare(
    fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope, scratch: ScratchPool
) -> Verdict | Refusal:
    """The same with one kind of memory; a Refusal if there was too little, and then ``fn`` has not run on ``args``.

    Nothing refers to ``scratch`` memory any more when this returns.
    """
    trial: _Trial | None = None
    first: _First | Refusal
    try:
        with scratch():
            trial = _Trial(fn, driver, executable, args, scope)
            first = trial.replay_on_copies()
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - kernels and allocations raise anything; the uncaptured run answers the call
        if is_out_of_memory(error):
            return Refusal.of(error)
        first = _raised(error, replaying=trial is not None and trial.replaying)
    if trial is not None and isinstance(first, Refusal):
        first = trial.explained(Verdict((), first)).refusal or first
    outputs = fn(list(args))
    if trial is None or isinstance(first, Refusal):
        return Verdict(outputs, first if isinstance(first, Refusal) else None)
    return _judged(trial, first, outputs, scratch)


def _judged(trial: _Trial, first: _First, outputs: Sequence[Any], scratch: ScratchPool) -> Verdict:
    """The verdict on a replay, and where it is wrong, the launch that is."""
    try:
        with scratch():
            verdict = trial.judge(first, outputs)
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - the same; the call has its answer already
        return Verdict(outputs, _raised(error, replaying=trial.replaying))
    return trial.explained(verdict)


def _raised(error: Exception, *, replaying: bool) -> Refusal:
    """Why a replay may not be used: memory was short, it raised, or what compares it did, which says nothing of it."""
    if is_out_of_memory(error):
        return Refusal.of(error)
    return Refusal("replay-raised" if replaying else "comparison-raised", f"{type(error).__name__}: {error}")


def verify(
    fn: Function,
    driver: Driver,
    executable: Executable,
    args: list[Any],
    scope: Scope,
    name: str,
    unverified: Callable[[str], None],
) -> Sequence[Any] | None:
    """Answer a call by a replay that was compared with a run of ``fn`` on copies made before.

    None, with nothing changed, when there is no room for copies, when ``fn`` raises, or when the executable declines.
    ``unverified`` is told why a call is answered without having been compared, or is not answered for that reason.
    Raises ReplayError, naming the region ``name``, the output, and the first launch that differs, when they differ.
    """
    trial = _Trial(fn, driver, executable, args, scope)
    if trial.over_budget:
        unverified(f"copies of written arguments exceed {scope.budget} bytes")
        return None
    with driver.scratch_pool(args) as scratch:
        return _verify(trial, name, scratch, unverified)


def _verify(trial: _Trial, name: str, scratch: ScratchPool, unverified: Callable[[str], None]) -> Sequence[Any] | None:
    try:
        with scratch():
            expected = trial.run_on_copies()
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - what the uncaptured run raises, it raises to the caller next
        unverified(f"an uncaptured run on copies raised {type(error).__name__}: {error}")
        return None
    if expected is None:
        unverified("another thread drew from the generator of the uncaptured run")
        return None
    outputs = trial.executable.replay(list(trial.args))
    if outputs is None:
        return None
    try:
        with scratch():
            differs = trial.unlike(expected, outputs)
    except Exception as error:  # noqa: BLE001 - the replay has answered the call
        unverified(f"the comparison raised {type(error).__name__}: {error}")
        return outputs
    if differs is not None:
        found = trial.diagnosed()
        with scratch():
            near = trial.scope.spread is not None and trial.unlike(expected, outputs, loosely=True) is None
        if near and found is not None and found.right:
            return outputs
        where = "" if found is None else f"; {found.text}"
        raise ReplayError(f"region {name}: a replay differs from an uncaptured run: {differs}{where}")
    return outputs


# -- the runs of one comparison ----------------------------------------------------------------------------------------


class _Trial:
    """One comparison: the memory involved, and the runs made on it."""

    def __init__(self, fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope) -> None:
        self.fn, self.driver, self.executable, self.args, self.scope = fn, driver, executable, args, scope
        self.random = _Draws(driver, scope.program)
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

    def replay_on_copies(self) -> _First | Refusal:
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
            result = self._doubt(outputs, working) or _First(outcome, pristine, working.args)
        finally:
            if self._fingerprints() != before:
                raise ReplayError("a replay wrote to an argument that it only reads, and that was too large to copy")
        return result if undone else Refusal("random-state", "another thread drew from the generator of the replay")

    def judge(self, first: _First, outputs: Sequence[Any]) -> Verdict:
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

    def _decided(self, outcome: _Outcome) -> list[bool]:
        """For each result, whether a launch that is known to be non-deterministic decides it. Where it is not known
        what the outputs are, any such launch may decide each of them. An argument with gaps between its elements, in
        which no run writes, is held to its bits."""
        if self.scope.program is None:
            return [False] * len(outcome.equal(outcome))
        recording = self.scope.program.recording
        decided = unrepeatable(recording, self.scope.program.slots)
        anything = any(launch.nondeterministic for launch in recording.launches)
        known = len(recording.outputs) == len(outcome.contents)
        outputs = [decided(each) for each in recording.outputs] if known else [anything] * len(outcome.contents)
        return [*outputs, *(decided(position) and _is_dense(self.args[position]) for position in outcome.arguments)]

    def _undecided(self, reference: _Outcome, other: _Outcome) -> str | None:
        """The first result in which two runs differ, and that no launch decides which is known to be
        non-deterministic."""
        equal, decided = reference.equal(other), self._decided(reference)
        wrong = (i for i, (same, may) in enumerate(zip(equal, decided, strict=True)) if not (same or may))
        index = next(wrong, None)
        return None if index is None else f"{reference.name(index)} has other values"

    def _judge_again(self, first: _First, outputs: Sequence[Any], reference: _Outcome) -> Verdict:
        """Whose fault a difference in values is: a wrong replay's, or the region's own, which has a spread then.

        Where the region draws, runs on the numbers of the answering one would have other threads draw them, too. Each
        round replays anew: where a rounding error decides a sign, one run of many is further off than all others, and
        that may be the replay. A wrong replay is further off each time.
        """
        left = _Run(reference, self._results(outputs, self.args))
        left = self._uncaptured_again(first) if self.random else left
        spread: Spread = (None,) * len(left.results)
        seen = [first.outcome]
        unlike: str | None = None
        for runs in RUNS:
            for _ in range(runs):
                wider = self._run_again(first, left, spread)
                if isinstance(wider, Refusal):
                    return Verdict(outputs, wider, comparable=False)
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

    def _run_again(self, first: _First, left: _Run, spread: Spread) -> Spread | Refusal:
        """``spread`` with one more uncaptured run, on copies, held against what the first one ``left``."""
        again = self._uncaptured_again(first)
        reference, outcome = left.outcome, again.outcome
        moved = moved_on(reference, outcome)
        if moved is not None:
            return Refusal("random-state", moved)
        unlike = difference(reference, outcome, values=False) or self._undecided(reference, outcome)
        if unlike is not None:
            return _unsteady(f"in another uncaptured run, {unlike}")
        found = widened(spread, left.results, again.results, reference.equal(outcome))
        if isinstance(found, Unlike):
            return _unsteady(f"in another uncaptured run, {reference.name(found.index)} {found.how}")
        return found

    def _uncaptured_again(self, first: _First) -> _Run:
        """Another uncaptured run, on copies."""
        copies = self._retaken(first).args
        self.runs += 1
        return self._left(self.fn(list(copies)), copies)

    def _replay_again(self, first: _First) -> _Run | None:
        """Another replay, on copies; None where it declines."""
        copies = self._retaken(first).args
        outputs = self._replay(copies)
        return None if outputs is None else self._left(outputs, copies)

    def _replay(self, args: list[Any]) -> Sequence[Any] | None:
        """A replay; while one raises, and from then on, ``replaying`` says so."""
        self.replaying = True
        outputs = self.executable.replay(list(args))
        self.replaying = False
        return outputs

    def _left(self, outputs: Sequence[Any], args: list[Any]) -> _Run:
        """What a run returned, and left behind in ``args`` and in the generator."""
        state = self.random.state()
        return _Run(self._observe(outputs, args, state), self._results(outputs, args))

    def _unrepeated(self, seen: Sequence[_Outcome], reference: _Outcome, spread: Spread) -> str | None:
        """The first result that uncaptured runs repeat, and a replay that was ``seen`` does not."""
        for outcome in seen:
            for index, same in enumerate(reference.equal(outcome)):
                if spread[index] is None and not same:
                    return f"{reference.name(index)} {AGREED}"
        return None

    # -- on every call --------------------------------------------------------------------------------------------

    def run_on_copies(self) -> _Run | None:
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
        kept = self._results(outputs, copies) if any(self._decided(outcome)) else []
        return _Run(outcome, kept)

    def unlike(self, expected: _Run, outputs: Sequence[Any], *, loosely: bool = False) -> str | None:
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
        if refusal is None or refusal.reason not in _WRONG or not verdict.comparable:
            return verdict
        found = self.diagnosed()
        return verdict if found is None else replace(verdict, refusal=found.added_to(refusal))

    def diagnosed(self) -> Finding | None:
        """The launch in which a replay differs. Not to be called within scratch memory: it captures. Not looked for
        where that would run the body of an operator that is written in Python."""
        program = self.scope.program
        if program is None or program.recording.python:
            return None
        from pygraph.debug.diagnose import diagnose  # needed only where something differs

        return diagnose(self.fn, self.driver, program, self.args)

    def _beyond(self, expected: _Run, replayed: _Run, spread: Spread, *, loosely: bool = False) -> str | None:
        """In what a replay differs by more than ``spread`` allows."""
        reference, outcome = expected.outcome, replayed.outcome
        unlike = difference(reference, outcome, values=False) or self._undecided(reference, outcome)
        if unlike is not None:
            return unlike
        equal = reference.equal(outcome)
        found = None if all(equal) else beyond(spread, expected.results, replayed.results, equal, loosely=loosely)
        return None if found is None else f"{outcome.name(found.index)} {found.how}"

    def _observe(self, outputs: Sequence[Any] | None, args: Sequence[Any], state: torch.Tensor | None) -> _Outcome:
        return observe(outputs or (), args, self.watched, state)

    def _results(self, outputs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """What a run left: its outputs, then the watched arguments by position."""
        return [*outputs, *(args[position] for position in sorted(self.watched))]

    def _retaken(self, first: _First) -> Snapshot:
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


def _unsteady(detail: str) -> Refusal:
    return Refusal("comparison-failed", f"non-deterministic: {detail}")


def _nbytes(chosen: Sequence[Block]) -> int:
    return sum(block.nbytes for block in chosen)


# -- random numbers ----------------------------------------------------------------------------------------------------
#
# A region that draws nothing has nothing saved and nothing restored. One that draws uses the default generator of its
# device, which other threads may use as well. Two ways keep them apart:
#
# - A run whose numbers the answering run draws again comes first, on the generator as it is, and is undone right after:
#   in one step, and only if nobody drew since it ended. What another thread draws *during* that run is not noticed, and
#   comes once more.
# - All other runs draw from a stream of their own. As long as they take, the generator has a state that nobody had
#   before, and what other threads draw comes from that stream, too. Then the generator goes on where it was.


class _Draws:
    """The generator that ``program`` draws from; false if there is none. Without a program, nothing is drawn.

    All methods raise ReplayError if a state cannot be brought back: the numbers drawn later would be others.
    """

    def __init__(self, driver: Driver, program: Program | None) -> None:
        self._driver = driver
        self._generator = None if program is None else driver.generator(program)
        self._start = self.end = self.state()

    def __bool__(self) -> bool:
        return self._generator is not None

    def state(self) -> torch.Tensor | None:
        """The state of the generator now; None where nothing is drawn."""
        return None if self._generator is None else self._generator.get_state()

    def undo(self) -> bool:
        """Bring back the state that the generator had when this object was made; ``end`` is the one that it had.

        False, with nothing changed, if somebody drew in the meantime.
        """
        if self._start is None:
            return True
        with _told():
            self.end = self.state()
            before = self._exchange(self._start, self.end)
            return self.end is not None and torch.equal(before, self.end)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Draw from a stream of numbers that nobody drew from before. ``restart`` goes back to its beginning."""
        if self._generator is None:
            yield
            return
        own = torch.Generator(self._generator.device)
        own.seed()
        outer, self._start = self._start, own.get_state()
        theirs = self._exchange(self._start)
        try:
            yield
        finally:
            self._start = outer
            with _told():
                self._exchange(theirs)

    def restart(self) -> None:
        """Within ``apart``: draw the same numbers once more."""
        if self._start is not None:
            self._exchange(self._start)

    def _exchange(self, to: torch.Tensor, expected: torch.Tensor | None = None) -> torch.Tensor:
        assert self._generator is not None
        return self._driver.exchange_state(self._generator, to, expected)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Whatever is raised becomes a ReplayError."""
    try:
        yield
    except Exception as error:
        said = f"the random state could not be brought back: {type(error).__name__}: {error}"
        raise ReplayError(said) from error


# -- what a run did ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Outcome:
    """``structure`` and ``contents`` of each output, fingerprints of some arguments afterwards, and the state of the
    generator that the region draws from, if it does.

    The structure of an output tensor is its type, sizes, strides, dtype, device and whose memory it is: a byte of
    which argument, or which fresh storage and offset.
    """

    structure: tuple[Hashable, ...]
    contents: tuple[bytes, ...]
    arguments: dict[int, bytes]
    rng: torch.Tensor | None

    def equal(self, other: _Outcome) -> list[bool]:
        """For each result, outputs first, whether two runs of one structure left the same bits."""
        mine, theirs = (*self.contents, *self.arguments.values()), (*other.contents, *other.arguments.values())
        return [a == b for a, b in zip(mine, theirs, strict=True)]

    def name(self, index: int) -> str:
        """What the result of this index is called."""
        outputs = len(self.contents)
        return f"output {index}" if index < outputs else f"argument {list(self.arguments)[index - outputs]}"


def observe(
    outputs: Sequence[Any], args: Sequence[Any], watched: Collection[int] = (), rng: torch.Tensor | None = None
) -> _Outcome:
    """The outcome of a run that returned ``outputs`` and left ``args``; ``watched`` arguments are fingerprinted."""
    contents = tuple(digest(out) if isinstance(out, torch.Tensor) else b"" for out in outputs)
    arguments = {position: digest(span(args[position])) for position in sorted(watched)}
    return _Outcome(_structure(outputs, args), contents, arguments, rng)


def difference(reference: _Outcome, other: _Outcome, *, values: bool = True) -> str | None:
    """The first thing in which two runs differ but for the random state, or None. Without ``values``: in structure."""
    if len(reference.structure) != len(other.structure):
        return f"{len(other.structure)} outputs instead of {len(reference.structure)}"
    for index, (expected, actual) in enumerate(zip(reference.structure, other.structure, strict=True)):
        if expected != actual:
            return f"output {index} is {actual} instead of {expected}"
        if values and reference.contents[index] != other.contents[index]:
            return f"output {index} has other values"
    for position, fingerprint in reference.arguments.items():
        if values and other.arguments[position] != fingerprint:
            return f"argument {position} has other values afterwards"
    return None


def moved_on(reference: _Outcome, other: _Outcome) -> str | None:
    """What is to be said where two runs left other random states: they drew otherwise, or somebody else did."""
    if reference.rng is None or other.rng is None or torch.equal(reference.rng, other.rng):
        return None
    return "the random state afterwards is another one"


def _structure(outputs: Sequence[Any], args: Sequence[Any]) -> tuple[Hashable, ...]:
    objects: dict[int, str] = {}
    for position, arg in enumerate(args):
        objects.setdefault(id(arg), f"argument {position} itself")
    extents = [(p, a.device, a.data_ptr(), a.data_ptr() + extent(a)) for p, a in enumerate(args) if _is_tensor(a)]
    storages: dict[int, int] = {}
    found: list[Hashable] = []
    for index, out in enumerate(outputs):
        if not _is_tensor(out):
            found.append(bits(out))
        elif id(out) in objects:
            found.append(objects[id(out)])
        else:
            objects[id(out)] = f"output {index} itself"
            found.append(_describe(index, out, extents, storages))
    return tuple(found)


def _describe(
    index: int, out: torch.Tensor, extents: list[tuple[int, torch.device, int, int]], storages: dict[int, int]
) -> Hashable:
    """Facts of a tensor that no argument and no earlier output is, and whose memory it lies in."""
    facts = (type(out).__name__, tuple(out.size()), out.stride(), str(out.dtype), str(out.device), out.is_inference())
    low = out.data_ptr()
    high = low + extent(out)
    for position, device, start, end in extents:
        if device == out.device and max(low, start) < min(high, end):
            return (*facts, f"a view of argument {position} at byte {low - start}")
    if low == high:
        return (*facts, "empty")
    owner = storages.setdefault(out.untyped_storage().data_ptr(), index)
    return (*facts, f"memory of output {owner} from element {out.storage_offset()}")


def _is_dense(arg: torch.Tensor) -> bool:
    """Whether elements of ``arg`` lie side by side."""
    return extent(arg) <= arg.numel() * arg.element_size()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
