"""Which launch of a replay is the first that differs from the uncaptured program: a diagnosis, made on copies.

The uncaptured program runs with every call observed. The launches that a call was captured as run next to it, one by
one, on memory that held the same before the call; what the call was given and returned must be equal afterwards. So
each launch is judged by itself, and a wrong one does not make those wrong that come after it.

A call that is known to be non-deterministic runs some more times on the same operands, and its launches have to do what
one of those runs might have done. That tells a right replay from a wrong one where whole runs do not: one flipped sign
of a rounding error changes all that comes after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.errors import ReplayError
from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.driver import Driver, Program, Slot, Transient
from pygraph.runtime.generators import Draws
from pygraph.runtime.layout import lifetimes
from pygraph.runtime.mismatch import Mismatch, dense, mismatch, shaped
from pygraph.runtime.nondeterminism import RUNS, Spread, Unlike, beyond, widened
from pygraph.runtime.ordering import dependences
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.recording import AllocationKind, Launch, OutputKind
from pygraph.runtime.stepped_memory import Key, Ranges, SteppedMemory, needed
from pygraph.runtime.stepping import Operand, Repeat, Stepper, Steps
from pygraph.runtime.tensors import blocks, extent, span, take

__all__ = ["Finding", "Suspect", "diagnose"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """What is diagnosed: a ``program`` captured from ``fn``, arguments as they were before the replay that went wrong
    (they are not written), what a comparison allows itself, and the memory for copies."""

    fn: Callable[[list[Any]], Sequence[Any]]
    driver: Driver
    program: Program | None
    args: Sequence[Any]
    budget: int
    sensitive: frozenset[int] = frozenset()
    transient: Transient = contextlib.nullcontext


@dataclass(frozen=True, slots=True)
class Finding:
    """What a diagnosis says, and the launch to blame if there is one. ``right``: all launches are as their calls."""

    text: str
    launch: Launch | None = None
    right: bool = False

    def added_to(self, refusal: Refusal) -> Refusal:
        """``refusal`` with what was found."""
        detail = f"{refusal.detail}; {self.text}"
        return (
            Refusal(refusal.reason, detail) if self.launch is None else Refusal.at(self.launch, refusal.reason, detail)
        )


def diagnose(suspect: Suspect) -> Finding | None:
    """Find the first launch that differs. None where the driver cannot step. Never raises an Exception: what goes
    wrong here must not hide what was found wrong before. Numbers are drawn apart from the caller's; ReplayError is
    raised if the random state cannot be brought back."""
    if suspect.program is None or not isinstance(suspect.driver, Steps):
        return None
    random = Draws(suspect.driver, suspect.program)
    try:
        with random.apart(), torch.no_grad():
            return _search(suspect, suspect.program, suspect.driver, random)
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - a faulty program may raise anything when it is run once more
        return Finding(f"which launch differs could not be found out: {_said(error)}")


def _said(error: Exception) -> str:
    """The kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _search(suspect: Suspect, program: Program, steps: Steps, random: Draws) -> Finding:
    copied = blocks(suspect.args, suspect.sensitive)
    nbytes = 2 * sum(block.nbytes for block in copied) + needed(program)
    if nbytes > suspect.budget:
        return Finding(f"which launch differs was not looked for: {nbytes} bytes exceed the budget of {suspect.budget}")
    stepper = steps.stepper(program, suspect.fn, suspect.args)  # may capture, which takes memory of its own kind
    with suspect.transient():
        ours, theirs = take(suspect.args, copied), take(suspect.args, copied)
        memory = SteppedMemory(program, ours, stepper.device)
        random.restart()
        lockstep = _Lockstep(program, stepper, memory, random)
        returned = steps.trace(program, suspect.fn, list(theirs.args), lockstep)
        lockstep.finish(theirs.args, returned)
    misplaced = _misplaced(program)
    if misplaced is not None and lockstep.wrong is not None and not _earlier(misplaced, lockstep.wrong):
        return lockstep.wrong
    return misplaced or lockstep.wrong or _misordered(program) or lockstep.doubtful or _NOTHING


def _earlier(first: Finding, second: Finding) -> bool:
    """Whether the launch of one finding does not come after that of another."""
    return first.launch is not None and second.launch is not None and first.launch.index <= second.launch.index


_NOTHING = Finding(
    "no launch differs when each is run by itself on what the uncaptured run held: not a kernel's parameters are the "
    "cause, but what lies between launches (stale addresses, memory that is shared, streams)",
    right=True,
)


# -- running both programs side by side -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Placed:
    """An operand, and the same bytes in the memory that launches are run on."""

    operand: Operand
    key: Key
    offset: int
    ours: torch.Tensor

    @property
    def end(self) -> int:
        """One past its last byte in the allocation."""
        return self.offset + self.ours.numel()


class _Lockstep:
    """Runs launches as the calls that they came from go by. ``wrong`` is a launch that surely differs, ``doubtful``
    what may have a harmless reason; of both, the first that is met."""

    def __init__(self, program: Program, stepper: Stepper, memory: SteppedMemory, random: Draws) -> None:
        self.wrong: Finding | None = None
        self.doubtful: Finding | None = None
        self._program, self._stepper, self._memory = program, stepper, memory
        self._launches = program.recording.launches
        self._addresses = AddressMap(program.recording.allocations)
        self._words: dict[int, list[Slot]] = {}
        self._first: dict[Key, int] = {}
        for slot in program.slots:
            self._words.setdefault(slot.launch, []).append(slot)
            self._first.setdefault((slot.kind, slot.index), slot.launch)
        self._equal = Ranges()
        for allocation in program.recording.allocations:
            if allocation.kind is AllocationKind.INPUT:
                self._equal.add(allocation.key, 0, allocation.nbytes)
        self._unclaimed: dict[Key, int] = {}
        """The last launch that used an allocation, of those that no call is known for."""
        lives = lifetimes(program.recording, _sound(program), program.layout.fresh)
        self._lives = {life.index: range(life.first, life.last + 1) for life in lives}
        self._given: frozenset[Key] = frozenset()
        """What the present call is given, and was copied."""
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What the present call may write, and copies of what it held, if the call is known to be non-deterministic."""
        self._next = 0
        self._draws, self._random = random, random.state()

    def before(self, begin: int, end: int, given: Sequence[Operand]) -> None:
        """Run launches that nobody observed, and make what the call is given equal."""
        if self.wrong is not None:
            return
        for launch in range(self._next, begin):
            self._unclaimed.update(((slot.kind, slot.index), launch) for slot in self._words.get(launch, []))
        self._advance(begin)
        placed = self._placed(given, begin)
        self._check_kept(begin, placed)
        for each in placed:
            self._make_equal(each)
            self._unclaimed.pop(each.key, None)
        self._given = frozenset(each.key for each in placed)
        written = [each.tensor for each in given if each.written and self._unsteady(begin, end)]
        self._saved = [(tensor, span(tensor).clone()) for tensor in written]

    def after(
        self, begin: int, end: int, given: Sequence[Operand], returned: Sequence[Operand], repeat: Repeat
    ) -> None:
        """Run the launches of the call, and hold what they did against what it did."""
        if self.wrong is not None:
            return
        self._advance(end)
        if self.wrong is not None:
            return
        if not self._memory.intact:
            self.wrong = self._blame(begin, end, "writes outside of the memory that it is given")
            return
        placed = self._placed([*given, *returned], end - 1)
        found = [(each, self._unlike(each)) for each in placed]
        if any(unlike for _, unlike in found) and self._unsteady(begin, end):
            self._judge_unsteady(begin, end, placed, returned, repeat)
            return
        for each, unlike in found:
            if unlike is None:
                self._equal.add(each.key, each.offset, each.offset + dense(each.operand.tensor))
        different = [(each, unlike) for each, unlike in found if unlike is not None]
        different.sort(key=lambda pair: (pair[1].unset, not pair[0].operand.written))
        if different:
            self._differs(begin, end, *different[0])

    def _unsteady(self, begin: int, end: int) -> bool:
        """Whether a call is known to be non-deterministic, and can be run again: it draws no random numbers."""
        launches = self._launches[begin:end]
        return any(each.nondeterministic for each in launches) and not any(each.random for each in launches)

    def _judge_unsteady(
        self, begin: int, end: int, placed: Sequence[_Placed], returned: Sequence[Operand], repeat: Repeat
    ) -> None:
        """Hold the launches of a non-deterministic call against further runs of it, on the operands that it had."""
        kept = [(tensor, span(tensor).clone()) for tensor, _ in self._saved]
        reference = [shaped(span(each.operand.tensor), each.operand.tensor) for each in placed]
        ours = [shaped(each.ours, each.operand.tensor) for each in placed]
        equal = [self._unlike(each) is None for each in placed]
        numbers = {id(each): number for number, each in enumerate(returned)}
        spread: Spread = (None,) * len(placed)
        unlike: Unlike | None = None
        try:
            for runs in RUNS:
                for _ in range(runs):
                    _put_back(self._saved)
                    again = repeat()
                    others = [
                        again[numbers[id(each.operand)]].tensor if id(each.operand) in numbers else each.operand.tensor
                        for each in placed
                    ]
                    same = [_same_elements(a, b) for a, b in zip(reference, others, strict=True)]
                    wider = widened(spread, reference, others, same)
                    if isinstance(wider, Unlike):
                        self.doubtful = self.doubtful or self._unlike_itself(begin, end, placed[wider.index], wider.how)
                        return
                    spread = wider
                unlike = beyond(spread, reference, ours, equal)
                if unlike is None:
                    break
        finally:
            _put_back(kept)
        if unlike is not None:
            said = f"is the first that differs: {_name(placed[unlike.index])} {unlike.how}"
            self.wrong = self._blame(begin, end, said)
            return
        for each in placed:  # the reference's result goes on for both
            self._make_equal(each)

    def _unlike_itself(self, begin: int, end: int, each: _Placed, how: str) -> Finding:
        return self._blame(begin, end, f"does not repeat itself: in another run, {_name(each)} {how}")

    def finish(self, args: Sequence[Any], returned: Sequence[Any]) -> None:
        """Run what nobody observed behind the last call, and look at arguments and outputs."""
        if self.wrong is not None or self.doubtful is not None:
            return
        self._advance(len(self._launches))
        for what, operand in self._results(args, returned):
            for each in self._placed([operand], len(self._launches)):
                unlike = self._unlike(each)
                if unlike is not None:
                    self.doubtful = Finding(
                        f"no call differs, but {what} does afterwards: {_name(each)} has {unlike}; look at launches "
                        "that no operator and no known kernel claims, and at where outputs are said to lie"
                    )
                    return

    def _results(self, args: Sequence[Any], returned: Sequence[Any]) -> list[tuple[str, Operand]]:
        """Arguments and fresh outputs, at the addresses that they had when captured."""
        recording = self._program.recording
        starts = {a.key: a.address for a in recording.allocations}
        found = [
            (f"argument {i}", Operand(starts[AllocationKind.INPUT, i], value, True))
            for i, value in enumerate(args)
            if (AllocationKind.INPUT, i) in starts
        ]
        for position, (output, value) in enumerate(zip(recording.outputs, returned, strict=True)):
            if output.kind is OutputKind.FRESH:
                address = starts[AllocationKind.POOL, output.allocation] + output.offset * value.element_size()
                found.append((f"output {position}", Operand(address, value, True)))
        return found

    # -- running launches -----------------------------------------------------------------------------------------

    def _advance(self, end: int) -> None:
        """Run all launches before ``end``, on a random state of their own."""
        if self._next >= end:
            return
        theirs = self._draws.go_on(self._random)
        try:
            while self._next < end and self.wrong is None:
                self._run(self._next)
                self._next += 1
        finally:
            self._random = self._draws.go_on(theirs)

    def _run(self, launch: int) -> None:
        words = {slot.word: self._memory.address(slot) for slot in self._words.get(launch, [])}
        for slot in self._words.get(launch, []):
            key = (slot.kind, slot.index)
            if slot.kind is AllocationKind.POOL and self._first[key] == launch and key not in self._given:
                self._memory.forget(key)
        try:
            self._stepper.run(launch, words)
        except Exception as error:  # noqa: BLE001 - operators raise anything on memory that is not theirs
            self.wrong = self._blame(launch, launch + 1, f"raises when it is run by itself: {_said(error)}")

    def _placed(self, operands: Sequence[Operand], launch: int) -> list[_Placed]:
        """Operands in memory that a replay moves, where they lie in one allocation that has its memory at ``launch``.
        Others lie there before its first launch and after its last, whatever a call is given it for."""
        placed: list[_Placed] = []
        for operand in operands:
            owner = self._addresses.inside(operand.address)
            nbytes = extent(operand.tensor)
            if owner is None or not nbytes or operand.tensor.device != self._stepper.device:
                continue
            life = self._lives.get(owner.index) if owner.kind is AllocationKind.POOL else None
            if life is not None and launch not in life:
                continue
            offset = operand.address - owner.address
            ours = self._memory.bytes(owner.key, offset, nbytes)
            if ours is not None:
                placed.append(_Placed(operand, owner.key, offset, ours))
        return placed

    # -- what is found --------------------------------------------------------------------------------------------

    def _check_kept(self, begin: int, placed: Sequence[_Placed]) -> None:
        """What is only read has to hold what it held when it was last seen equal, or what launches made of it for which
        no call is known."""
        for each in placed:
            author, kept = self._unclaimed.get(each.key), self._equal.covers(each.key, each.offset, each.end)
            if self.doubtful is not None or each.operand.written or (author is None and not kept):
                continue
            unlike = self._unlike(each)
            if unlike is None:
                continue
            if author is not None:
                said = f"is the last that used {_name(each)}, which then has {unlike}; no call is known to launch it"
                self.doubtful = self._blame(author, author + 1, said)
                continue
            said = f"reads {_name(each)}, which was right when it was last used, and now has {unlike}"
            self.doubtful = self._blame(begin, begin + 1, f"{said}: a launch before writes to memory not its own")

    def _unlike(self, each: _Placed) -> Mismatch | None:
        return mismatch(each.operand.tensor, each.ours)

    def _make_equal(self, each: _Placed) -> None:
        each.ours.copy_(span(each.operand.tensor))
        self._equal.add(each.key, each.offset, each.end)

    def _differs(self, begin: int, end: int, each: _Placed, unlike: Mismatch) -> None:
        what = "what it writes to" if each.operand.written else "what it only reads,"
        said = f"{what} {_name(each)} has {unlike}"
        if not unlike.unset:
            self.wrong = self._blame(begin, end, f"is the first that differs: {said}")
        elif self.doubtful is None:
            self.doubtful = self._blame(begin, end, f"leaves unset what the uncaptured run may have set: {said}")

    def _blame(self, begin: int, end: int, what: str) -> Finding:
        return Finding(f"{self._named(begin, end)} {what}", self._launches[begin])

    def _named(self, begin: int, end: int) -> str:
        launch = self._launches[begin]
        where = f" at {launch.loc}" if launch.loc else ""
        which = f"launch {begin}" if end - begin == 1 else f"the call of launches {begin} to {end - 1}"
        call = f" of {launch.call}" if launch.call not in (None, launch.name) else ""
        return f"{which} of {len(self._launches)} ({launch.name}{call}{where})"


def _put_back(kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Have tensors hold the bytes that they held when these were copied."""
    for tensor, data in kept:
        span(tensor).copy_(data)


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same strides have equal bits in all elements."""
    return mismatch(a, span(b)) is None


def _name(each: _Placed) -> str:
    kind, index = each.key
    owner = f"argument {index}" if kind is AllocationKind.INPUT else f"allocation {index}"
    tensor = each.operand.tensor
    place = f" at byte {each.offset}" if each.offset else ""
    return f"{owner}{place} ({str(tensor.dtype).removeprefix('torch.')}{list(tensor.size())})"


# -- what the program alone shows -----------------------------------------------------------------------------------


def _misplaced(program: Program) -> Finding | None:
    """Two intermediates that share bytes of the workspace while both are needed."""
    layout, launches = program.layout, program.recording.launches
    lives = [life for life in lifetimes(program.recording, _sound(program), layout.fresh) if life.nbytes]
    lives.sort(key=lambda life: (life.first, life.index))
    for position, late in enumerate(lives):
        for early in lives[:position]:
            a, b = layout.offsets[early.index], layout.offsets[late.index]
            if early.meets(late) and a < b + late.nbytes and b < a + early.nbytes:
                launch = launches[late.first]
                return Finding(
                    f"launch {launch.index} ({launch.name}) begins to use allocation {late.index} in bytes of the "
                    f"workspace that allocation {early.index} needs until launch {early.last}",
                    launch,
                )
    return None


def _sound(program: Program) -> list[Slot]:
    """The slots that name the allocation which their word pointed into when captured: a wrong one says nothing of how
    long memory is needed."""
    addresses, launches = AddressMap(program.recording.allocations), program.recording.launches
    owners = [addresses.inside(launches[slot.launch].words[slot.word]) for slot in program.slots]
    named = zip(program.slots, owners, strict=True)
    return [slot for slot, owner in named if owner is None or owner.key == (slot.kind, slot.index)]


def _misordered(program: Program) -> Finding | None:
    """A launch that runs before one that it depends on."""
    rank = {launch: position for position, launch in enumerate(program.order)}
    for earlier, later in dependences(program.recording, program.slots, program.layout):
        if rank[earlier] > rank[later]:
            a, b = program.recording.launches[earlier], program.recording.launches[later]
            return Finding(
                f"launch {later} ({b.name}) runs before launch {earlier} ({a.name}), which it depends on",
                b,
            )
    return None
