"""Compares a replay with an uncaptured run: before a program is first used, and in later calls if that is asked for, or
for bodies of branches and loops that no compared call has run.

    1. replay on copies of the arguments
    2. run uncaptured: the call's answer
    3. compare the outcomes

If a replay calls operators, 2. comes before 1., and the replay repeats their effects: no operator is called twice. If
all ranks of a process group compare ``together``, each run sends collectives, and all ranks make the same runs. They
make them before 2., so that nothing remains to be sent if that raises.

The caller's tensors see exactly one run, random state advances once, and the call is answered, whatever is found.
Outcomes go to ``judge``. If bits differ only in results that a non-deterministic launch decides, it is asked again with
the spread of some more runs on copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

import torch

from pygraph.errors import CaptureError, ReplayError
from pygraph.program.program import Program
from pygraph.program.recording import AllocationKind
from pygraph.runtime.answers import Answers, in_flight
from pygraph.runtime.contract import Driver, Executable, ScratchPool
from pygraph.runtime.critical import unbroken
from pygraph.runtime.judge import ODD_REPLAY, RANDOM_STATE, RUNS, Outcome, Spread, judge
from pygraph.runtime.nondeterminism import unrepeatable
from pygraph.runtime.provenance import Refusal, is_out_of_memory
from pygraph.runtime.tensors import Block, Snapshot, bits, blocks, digests, extent, fingerprint, same_bytes, span, take

__all__ = ["Verdict", "compare", "observe", "verify"]

Function = Callable[[list[Any]], Sequence[Any]]

_DECLINED = "replay-declined"

_WRONG = ("comparison-failed", "replay-raised")
"""Refusals that a launch of the replay may have caused."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one comparison.

    outputs: outputs of the uncaptured run, which answers the call
    refusal: reason why the replay may not be used, if so
    tolerant: the replay was accepted within a tolerance
    runs: uncaptured runs in addition to the one that answers
    arguments: fingerprint of the arguments of an ``odd-replay``, unless ranks compare together
    """

    outputs: Sequence[Any]
    refusal: Refusal | None
    tolerant: bool = False
    runs: int = 0
    arguments: bytes = b""


def compare(
    fn: Function,
    driver: Driver,
    executable: Executable,
    args: list[Any],
    program: Program,
    answer: Function | None = None,
    *,
    tolerant: bool = False,
    odd: bool = False,
    together: Callable[[str | None], bool] | None = None,
    exempt: Collection[int] = (),
) -> Verdict:
    """Replay on copies of ``args``, then run ``answer`` (default: ``fn``) on ``args`` themselves, and compare the two.
    Further runs on copies call ``fn``. ``tolerant``: the program was accepted within a tolerance before, so results on
    which uncaptured runs happen to agree this time have one, too. ``odd``: the last comparison of the region ended with
    ``odd-replay``; another such is ``comparison-failed``. Arguments at the positions ``exempt`` are neither copied nor
    compared: all runs use them in place. ``together`` is called once the copies are made, with the runs that this rank
    makes in addition to the answering one (``"once"``: a replay, ``"rounds"``: all that may be needed, None: it cannot
    make any). It returns whether all ranks make these runs: if not, none replays (``ranks-differ``).

    The replay is accepted if the bits of outputs, written arguments and random state are equal, as is the structure.
    Unequal values refuse it (``comparison-failed``, or ``stateful-operator`` if operators are written in Python),
    unless launches that are known to be non-deterministic decide them. The replay is refused this time if such values
    lie outside of the spread of uncaptured runs, which may be chance (``odd-replay``), or if the random state differs
    (``random-state``: another thread may have drawn).

    All runs but the answering one use the driver's scratch memory, or ordinary memory if a replay has no room there.
    Raises what ``answer`` raises, and ReplayError if the replay damaged an argument that it should only read and that
    was too large to copy, or if the random state could not be restored. Also raises ReplayError, with the call
    unanswered, if ranks have agreed on runs that this one cannot make: others would take its next messages for these.
    """
    answer = answer or fn
    trial = functools.partial(_Trial, fn, driver, executable, args, program, tolerant, odd, together, exempt)
    with driver.scratch_pool(args) as scratch:
        verdict = _compare(trial, answer, args, scratch)
    if isinstance(verdict, Refusal) and together is None:
        verdict = _compare(trial, answer, args, contextlib.nullcontext)
    return Verdict(answer(list(args)), verdict) if isinstance(verdict, Refusal) else verdict


def verify(name: str, *facts: Any, tolerant: bool, odd: bool, exempt: Collection[int] = ()) -> Verdict:
    """``compare`` a program in use. Also raises ReplayError, with the name of the region, the result, and the first
    launch that differs, if the replay did something else than the run that answers the call."""
    verdict = compare(*facts, tolerant=tolerant, odd=odd, exempt=exempt)
    refusal = verdict.refusal
    if refusal is not None and (refusal is RANDOM_STATE or refusal.reason in (*_WRONG, "stateful-operator")):
        raise ReplayError(f"region {name}: a replay differs from an uncaptured run: {refusal.detail}")
    return verdict


def _compare(begin: Callable[[], _Trial], answer: Function, args: list[Any], scratch: ScratchPool) -> Verdict | Refusal:
    """``compare`` with one kind of memory. Returns a Refusal, before ``answer`` has run, if there is too little.
    Afterwards, nothing refers to ``scratch`` memory any more."""
    trial: _Trial | None = None
    first: Outcome | Refusal | None  # None where the answering run comes first
    try:
        with scratch():
            trial = begin()
            first = trial.prepare() or (None if trial.answered else trial.run_rounds(trial.replay_prepared()))
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - kernels and allocations raise anything; the uncaptured run answers the call
        once_more = trial is None or not (trial.owes or trial.replay == "made")  # a second replay would say nothing
        if is_out_of_memory(error) and once_more:
            return Refusal.of(error)
        first = _raised(error, trial)
    if isinstance(first, Refusal):
        if trial is None:
            return Verdict(answer(list(args)), first)
        refusal = trial.explained(first)
        if trial.owes:
            name = trial.program.name
            raise ReplayError(f"region {name}: ranks agreed to replay this call; this one could not: {first}")
        return Verdict(answer(list(args)), refusal, runs=trial.runs)
    assert trial is not None
    with trial.answers.answering(scratch) if first is None else contextlib.nullcontext():
        outputs = answer(list(args))
    if trial.answers.failure is not None:
        return Verdict(outputs, _raised(trial.answers.failure, trial))
    try:
        with scratch():
            first = first or trial.replay_prepared()
            verdict = Verdict(outputs, first) if isinstance(first, Refusal) else trial.judge(first, outputs)
            if verdict.refusal is not None and verdict.refusal.reason == ODD_REPLAY:
                verdict = replace(verdict, arguments=fingerprint(trial.pristine))
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - the same; the call has its answer already
        return Verdict(outputs, _raised(error, trial))
    first = None  # its results are memory that explaining may need
    return replace(verdict, refusal=trial.explained(verdict.refusal), runs=trial.runs)


def _raised(error: Exception, trial: _Trial | None) -> Refusal:
    """The refusal for an exception: memory was short, or the replay raised, or the comparison, which proves nothing."""
    if is_out_of_memory(error) or isinstance(error, CaptureError):
        return Refusal.of(error)
    replaying = trial is not None and trial.replay == "begun"
    return Refusal("replay-raised" if replaying else "comparison-raised", f"{type(error).__name__}: {error}")


# -- the runs of one comparison ----------------------------------------------------------------------------------------


class _Trial:
    """One comparison: the memory involved, and the runs made on it. ``over_budget``: text if copies have no room.
    ``replay``: ``ahead``; ``begun``, and not ended, or raised; or ``made``. ``in_rounds``: all ranks make all runs that
    may be needed, whatever each has found so far. ``owes``: ranks have agreed on runs that this one has not made yet.
    ``varying``: memory whose contents are decided by launches that vary. ``spread``: spread of the further runs."""

    def __init__(
        self,
        fn: Function,
        driver: Driver,
        executable: Executable,
        args: list[Any],
        program: Program,
        tolerant: bool,
        odd: bool,
        together: Callable[[str | None], bool] | None,
        exempt: Collection[int],
    ) -> None:
        self.exempt = exempt
        self.fn, self.driver, self.executable, self.args, self.program = fn, driver, executable, args, program
        self.tolerant, self.odd, self.together = tolerant, odd, together
        self.answered = bool(program.calls) and together is None
        self.random = _Draws(driver, program)
        self.answers = Answers(program, driver.generator(program))
        self.filling, self.waited = in_flight(program)
        self.replay: Literal["ahead", "begun", "made"] = "ahead"
        self.runs = 0
        self.owes = False
        self.spread = Spread()
        every, written = self._blocks(args), program.written
        self.written = [block for block in every if written.intersection(block.members)]
        self.watched = sorted(position for block in self.written for position in block.members)
        saved, full = (sum(block.nbytes for block in chosen) for chosen in (self.written, every))
        budget = driver.spare_bytes()
        self.varying = unrepeatable(program.recording, program.slots)
        self.in_rounds = together is not None and bool(self.varying)
        runs = 3 if self.in_rounds else 1  # results of two besides: no rank may be short of memory on its own
        self.all_copied = saved + runs * full <= budget
        self.copied = every if self.all_copied else self.written
        self.read_in_place = [p for block in every if block not in self.copied for p in block.members]
        too_much = not self.all_copied and (1 + runs) * saved > budget
        self.room = budget - (1 if self.in_rounds else 2) * saved - runs * (full if self.all_copied else saved)
        self.over_budget = f"copies of written arguments exceed {budget} bytes" if too_much else None
        self.pristine: list[Any] = []
        self.first_copies: list[Any] = []
        self.working = Snapshot([], ())
        self.before: list[bytes] = []

    def _blocks(self, args: Sequence[Any]) -> tuple[Block, ...]:
        found = blocks(args, self.program.recording.offset_sensitive)
        return tuple(block for block in found if not any(member in self.exempt for member in block.members))

    def prepare(self) -> Refusal | None:
        """Make the copies that the replay takes. Returns a refusal if it may not begin."""
        ready = False
        try:
            if self.over_budget is not None:
                return Refusal("comparison-budget", self.over_budget)
            self.before = self._fingerprints()
            self.pristine = take(self.args, self.written).args
            only_read = {block for block in self.copied if block not in self.written and not block.whole}
            self.working = take(self.args, self.copied, only_read)
            self.first_copies = self.working.args
            ready = True
        finally:
            runs = "rounds" if self.in_rounds else "once"
            self.owes = self.together is not None and self.together(runs if ready else None)
        if self.together is None or self.owes:
            return None
        return Refusal("ranks-differ", "another rank does not replay this call")

    def replay_prepared(self) -> Outcome | Refusal:
        """Replay on these copies; its outcome. Its random draws are undone. If the answering run came before, the
        replay draws the same numbers."""
        working, self.working = self.working, Snapshot([], ())
        undone = False
        if self.answered:
            self.random.rewind()
            for position in self.waited:
                span(working.args[position]).copy_(span(self.args[position]))
        try:
            try:
                outputs = self._replay(working.args)
            finally:
                undone = self.random.undo()
            outcome = self._observe(outputs or (), working.args, self.random.end)
        finally:
            if self._fingerprints() != self.before:
                raise ReplayError("a replay wrote to an argument that it only reads, and that was too large to copy")
        if not undone:
            return Refusal("random-state", "another thread drew from the generator of the replay")
        if outputs is None:
            return Refusal(_DECLINED, "the arguments that were captured do not match")
        if not working.intact:
            return Refusal("comparison-failed", "replayed: bytes beside an argument were written")
        if not self._unread_unchanged():
            return Refusal("comparison-failed", "replayed: an argument is written though no launch says so")
        if not self.varying:
            return replace(outcome, results=[])
        varies = zip(outcome.results, self._varies(outcome), strict=False)  # there may be outputs too few or too many
        kept = [result if decided else None for result, decided in varies]
        tensors = [output for output in kept[: len(outputs)] if isinstance(output, torch.Tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        room = sum(storage.nbytes() for storage in storages.values()) <= self.room
        return replace(outcome, results=kept if room else [])

    def run_rounds(self, first: Outcome | Refusal) -> Outcome | Refusal:
        """Make all runs that any rank may need, before any rank answers its call. Returns ``first``, the replay's
        outcome or refusal, or else a refusal if these runs cannot judge it."""
        refusal: Refusal | None = None
        if isinstance(first, Refusal) and first.reason == _DECLINED:
            return first
        if self.in_rounds:
            with self.random.apart():
                reference = self._left(*self._run_again())
                for _ in range(sum(RUNS)):
                    try:
                        found = self._widen(reference)
                    except Exception as error:  # noqa: BLE001 - other ranks go on, and so does this one
                        found = Refusal.of(error)
                    refusal = refusal or found
        self.owes = False
        return refusal if refusal is not None and isinstance(first, Outcome) else first

    def judge(self, first: Outcome, outputs: Sequence[Any]) -> Verdict:
        """Compare the replay (``first``) with the uncaptured run that returned ``outputs``. Keeps random state."""
        answer = self._left(outputs, self.args, answering=True)
        if not self._unread_unchanged():
            return Verdict(outputs, Refusal("comparison-failed", "an argument is written though no launch says so"))
        self.first_copies.clear()
        refusal = self._judged(answer, first)
        return Verdict(outputs, refusal, tolerant=refusal is None and answer.contents != first.contents)

    def _blamed(self, refusal: Refusal) -> Refusal:
        """``refusal`` of a replay that differs where it must not. Operators written in Python are suspected first: a
        replay would repeat their internal state."""
        calls = self.program.recording.python
        if not calls:
            return refusal
        nodes = tuple(dict.fromkeys(node for call in calls for node in call.nodes))
        operators = tuple(dict.fromkeys(call.name for call in calls))
        names = " or ".join(operators)
        said = f"{refusal.detail}; written in Python, and so perhaps with a state of its own: {names}"
        return Refusal("stateful-operator", said, names, calls[0].loc if len(calls) == 1 else None, nodes, operators)

    def _varies(self, outcome: Outcome) -> list[bool]:
        """For each result, true if a launch that is known to be non-deterministic decides it. An argument with gaps
        between its elements, which no run writes, is compared by its bits."""
        recording, decided = self.program.recording, self.varying
        if not decided:
            return [False] * len(outcome.contents)
        found = [recording.owner(output) in decided for output in recording.outputs]
        for position in self.watched:
            argument = self.args[position]
            found.append((AllocationKind.INPUT, position) in decided and extent(argument) <= argument.nbytes)
        return [*found, *(operand.owner in decided for operand in self.answers.answered)]

    def _judged(self, answer: Outcome, first: Outcome) -> Refusal | None:
        """The final refusal of the replay, if any."""
        refusal = self._asked(answer, first)
        if _may_be_chance(refusal) and self.odd:
            refusal = Refusal("comparison-failed", f"twice in a row, {refusal.detail}")
        return self._blamed(refusal) if refusal is not None and refusal.reason == "comparison-failed" else refusal

    def _asked(self, answer: Outcome, first: Outcome) -> Refusal | None:
        """Ask ``judge``, after as many more runs on copies as that takes.

        If the region draws, these runs draw numbers of their own: if they drew those of the answering run, other
        threads would draw them, too. Their spread stands in for that of runs on its numbers.
        """
        ask = functools.partial(judge, answer, first, self._varies(answer), self.spread, tolerant=self.tolerant)
        refusal = ask()
        if self.in_rounds or not _may_be_chance(refusal):
            return refusal
        with self.random.apart():
            reference = self._left(*self._run_again()) if self.random else answer
            for runs in RUNS:
                for _ in range(runs):
                    unsteady = self._widen(reference)
                    if unsteady is not None:
                        return unsteady
                refusal = ask()
                if not _may_be_chance(refusal):
                    break
        return refusal

    def _widen(self, reference: Outcome) -> Refusal | None:
        """Add one more uncaptured run, on copies, to the spread. Returns a refusal if it cannot judge any replay."""
        return self.spread.widen(reference, self._left(*self._run_again()), self._varies(reference))

    def _run_again(self) -> tuple[Sequence[Any], list[Any]]:
        """Run uncaptured once more, on copies. Returns the outputs, and the copies."""
        copies = self._retaken()
        self.runs += 1
        with self.answers.repeating() if self.answered else contextlib.nullcontext():
            return self.fn(list(copies)), copies

    def _replay(self, args: list[Any]) -> Sequence[Any] | None:
        """Replay on ``args``, which are kept, with eager calls answered if the answering run came before."""
        self.replay = "begun"
        if self.answered:
            outputs = self.executable.replay_answered(list(args), self.answers.replaying())
        else:
            outputs = self.executable.replay(list(args))
        self.replay = "made"
        return outputs

    def explained(self, refusal: Refusal | None) -> Refusal | None:
        """``refusal`` with the launch that differs, if it refuses a replay as wrong. No runs may follow. Must not be
        called within scratch memory, since it captures. Does not search for the launch if that would run the body of an
        operator that is written in Python, or if ranks compare together."""
        self.pristine.clear()
        self.first_copies.clear()
        self.answers.clear()
        python, together = self.program.recording.python, self.together is not None
        if refusal is None or refusal.reason not in _WRONG or python or together:
            return refusal
        from pygraph.debug.diagnose import diagnose  # needed only where something differs

        return diagnose(self.fn, self.driver, self.program, self.args).added_to(refusal)

    def _left(self, outputs: Sequence[Any], args: Sequence[Any], *, answering: bool = False) -> Outcome:
        """The outcome of a run: ``outputs``, ``args``, and the generator's state, unless only eager calls draw. Their
        draws are repeated, so that only other threads change the state. ``answering``: the run answers the call."""
        program = self.program
        draws = not self.answered or any(each.random and each.eager is None for each in program.recording.launches)
        return self._observe(outputs, args, self.random.state() if draws else None, answering=answering)

    def _observe(
        self, outputs: Sequence[Any], args: Sequence[Any], rng: torch.Tensor | None, *, answering: bool = False
    ) -> Outcome:
        """The outcome of a run and its eager calls' operands. Skips memory that a collective may still fill."""
        found, recording = observe(outputs, args, self.watched, rng), self.program.recording
        owners = [recording.owner(output) for output in recording.outputs[: len(outputs)]]
        owners += [None] * (len(outputs) - len(owners))
        owners += [(AllocationKind.INPUT, position) for position in self.watched]
        known = zip(found.contents, owners, strict=True)
        contents = [b"" if owner in self.filling else content for content, owner in known]
        given = self.answers.answered if answering else self.answers.given
        contents += [operand.content for operand in given]
        names = (*found.names, *(operand.name for operand in given))
        results = [*found.results, *(operand.value for operand in given)]
        return replace(found, contents=tuple(contents), names=names, results=results)

    def _retaken(self) -> list[Any]:
        """Fresh copies of the arguments as they were before any run; the numbers drawn ``apart`` restart, too."""
        self.random.restart()
        every = self._blocks(self.pristine)
        wanted = [b for b in every if self.all_copied or set(b.members).intersection(self.watched)]
        return take(self.pristine, wanted).args

    def _unread_unchanged(self) -> bool:
        """True if the copies of arguments that no launch writes still equal the caller's tensors bit by bit."""
        pairs = ((a, b) for a, b in zip(self.args, self.first_copies, strict=True) if a is not b)
        skip = {id(self.args[p]) for p in self.watched}
        return same_bytes((a, b) for a, b in pairs if id(a) not in skip)

    def _fingerprints(self) -> list[bytes]:
        return digests([span(self.args[p]) for p in self.read_in_place])


def _may_be_chance(refusal: Refusal | None) -> TypeGuard[Refusal]:
    """True if more runs may lead to another answer."""
    return refusal is not None and refusal.reason == ODD_REPLAY


# -- random numbers ----------------------------------------------------------------------------------------------------
#
# A region that draws nothing has nothing saved and nothing restored. One that draws uses the default generator of its
# device, which other threads may use as well. Two ways keep them apart:
#
# - A run whose numbers the answering run draws again comes first, on the generator as it is, and is undone right after:
#   in one step, and only if nobody drew since it ended. Draws of another thread *during* that run are not noticed, and
#   their numbers are drawn again.
# - All other runs draw from a stream of their own. During them, the generator has a state that nobody had before, and
#   other threads draw from that stream, too. Afterwards, the generator continues where it was.


class _Draws:
    """The generator from which ``program`` draws; false if there is none. ReplayError is raised if a state cannot be
    restored: numbers drawn later would be different ones."""

    def __init__(self, driver: Driver, program: Program) -> None:
        self._driver, self._generator = driver, driver.generator(program)
        self._start = self.end = self.state()
        self._resume: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return self._generator is not None

    def state(self) -> torch.Tensor | None:
        """The state of the generator now; None if nothing is drawn."""
        return None if self._generator is None else self._generator.get_state()

    @unbroken
    def rewind(self) -> None:
        """Draw the same numbers again as since this object was made, until ``undo``."""
        if self._start is not None:
            self._resume = self._exchange(self._start)

    @unbroken
    def undo(self) -> bool:
        """Restore the state that the generator had when this object was made, or was rewound; ``end`` is the state that
        it replaces. Returns False, with nothing changed, if another thread drew in the meantime."""
        if self._start is None:
            return True
        back, self._resume = self._start if self._resume is None else self._resume, None
        with _told():
            self.end = self.state()
            before = self._exchange(back, self.end)
            return self.end is not None and torch.equal(before, self.end)

    @contextlib.contextmanager
    @unbroken
    def apart(self) -> Iterator[None]:
        """Draw from a stream of numbers that was not used before. ``restart`` goes back to its beginning."""
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
    """Turn any exception into a ReplayError."""
    try:
        yield
    except Exception as error:
        said = f"the random state could not be brought back: {type(error).__name__}: {error}"
        raise ReplayError(said) from error


# -- the outcome of a run ---------------------------------------------------------------------------------------------


def observe(
    outputs: Sequence[Any], args: Sequence[Any], watched: Sequence[int] = (), rng: torch.Tensor | None = None
) -> Outcome:
    """The outcome of a run that returned ``outputs`` and left ``args``, of which the ``watched`` ones are results."""
    results = [*outputs, *(args[position] for position in watched)]
    looked_at = [*outputs, *(span(args[position]) for position in watched)]
    found = iter(digests([each for each in looked_at if isinstance(each, torch.Tensor)]))
    contents = [next(found) if isinstance(each, torch.Tensor) else b"" for each in looked_at]
    names = [*(f"output {index}" for index in range(len(outputs))), *(f"argument {position}" for position in watched)]
    return Outcome(_structure(outputs, args), tuple(contents), tuple(names), rng, results)


def _structure(outputs: Sequence[Any], args: Sequence[Any]) -> tuple[Hashable, ...]:
    objects: dict[int, str] = {}
    for position, arg in enumerate(args):
        objects.setdefault(id(arg), f"argument {position} itself")
    tensors = [(p, arg) for p, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    extents = [(p, arg.device, arg.data_ptr(), arg.data_ptr() + extent(arg)) for p, arg in tensors]
    storages: dict[int, int] = {}
    found: list[Hashable] = []
    for index, out in enumerate(outputs):
        if not isinstance(out, torch.Tensor):
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
    """Facts of a tensor that is neither an argument nor an earlier output, and the memory in which it lies."""
    leading = zip(out.size(), out.stride(), strict=True) if out.numel() else ()
    strides = tuple(stride for size, stride in leading if size > 1)  # others lead to no element: kernels differ in them
    marks = out.is_inference(), out.is_conj(), out.is_neg()
    facts = (type(out).__name__, tuple(out.size()), strides, str(out.dtype), str(out.device), *marks)
    low = out.data_ptr()
    high = low + extent(out)
    for position, device, start, end in extents:
        if device == out.device and max(low, start) < min(high, end):
            return (*facts, f"a view of argument {position} at byte {low - start}")
    if low == high:
        return (*facts, "empty")
    owner = storages.setdefault(out.untyped_storage().data_ptr(), index)
    return (*facts, f"memory of output {owner} from element {out.storage_offset()}")
