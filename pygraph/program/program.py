"""A launch program: a recording, the addresses among its words, the layout of memory, and the steps of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pygraph.program.order import Order
from pygraph.program.recording import AllocationKind, EagerCall, Launch, Origin, Recording


@dataclass(frozen=True, slots=True)
class Slot:
    """A word that holds an address: word ``word`` of launch ``launch`` is ``offset`` bytes into an allocation."""

    launch: int
    word: int
    kind: AllocationKind
    index: int
    offset: int

    @property
    def key(self) -> tuple[AllocationKind, int]:
        """The name of the allocation."""
        return (self.kind, self.index)


@dataclass(frozen=True, slots=True)
class NonPointerWord:
    """A word that reads as an address, but is not one of an operand: a number, or uninitialised bytes. It stays as
    captured; if ``scratch``, replay substitutes a scratch address. ``call`` names the call of its launch."""

    launch: int
    word: int
    scratch: bool = False
    call: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of POOL allocations at replay: at ``offsets[index]`` bytes in one workspace of ``nbytes``. Those of
    outputs and of operands of eager calls (``fresh``) are allocated for each call."""

    nbytes: int
    offsets: dict[int, int]
    fresh: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Launches ``begin`` to ``end`` (excluded), replayed together.

    Before the step, memory is allocated for ``blocks`` of intermediates (bytes, last step that uses it, and
    intermediate ▸ byte) and for the POOL allocations ``taken``, each with a storage of its own. After it, the
    allocations ``released`` and the arguments ``dead`` are released.
    """

    begin: int
    end: int
    blocks: tuple[tuple[int, int, Mapping[int, int]], ...]
    taken: tuple[int, ...]
    released: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphSegment(Step):
    """Launches of the capture."""


@dataclass(frozen=True, slots=True)
class EagerStep(Step):
    """An operator that each replay calls, and the line that calls it."""

    call: EagerCall
    origin: Origin


@dataclass(frozen=True, slots=True)
class Program:
    """All data for a replay: the recording, the addresses among its words, the layout of memory, and the steps.

    Addresses of arguments must stay congruent to the captured ones modulo ``alignment`` bytes, since kernels load
    vectors; an argument that is only read is copied otherwise. ``non_pointers`` are words that read as addresses but
    have no slot. The arguments ``held`` are kept by others beyond the call, so that an early release gains nothing;
    those ``lent``, perhaps. ``name`` is the name of a replay in profiles. ``steps`` run in order; ``order`` is that of
    launches within a step (None: as captured). ``notes`` are remarks of passes, for reports.
    """

    recording: Recording
    slots: tuple[Slot, ...]
    layout: Layout
    non_pointers: tuple[NonPointerWord, ...] = ()
    held: frozenset[int] = frozenset()
    lent: frozenset[int] = frozenset()
    name: str = ""
    alignment: int = 16
    steps: tuple[Step, ...] = ()
    order: Order | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        from pygraph.program.text import print_program  # which imports this module

        return print_program(self)

    @property
    def calls(self) -> tuple[Launch, ...]:
        """The launches that are eager calls."""
        return tuple(launch for launch in self.recording.launches if launch.eager is not None)

    @property
    def written(self) -> frozenset[int]:
        """Positions of the arguments that a launch may write: exact if its uses are known, else all of its arguments
        that are not known to be only read."""
        inputs, launches = [slot for slot in self.slots if slot.kind is AllocationKind.INPUT], self.recording.launches
        return frozenset(slot.index for slot in inputs if launches[slot.launch].may_write(slot.word, slot.key))


def used_by_calls(recording: Recording, slots: Sequence[Slot]) -> frozenset[int]:
    """The POOL allocations of operands and results of eager calls."""
    calls = {launch.index for launch in recording.launches if launch.eager is not None}
    if not calls:
        return frozenset()
    return frozenset(slot.index for slot in slots if slot.kind is AllocationKind.POOL and slot.launch in calls)


def returned_by_calls(recording: Recording, slots: Sequence[Slot]) -> frozenset[int]:
    """The POOL allocations of results of eager calls: operators allocate that memory at each replay."""
    calls = {launch.index: len(launch.eager.operands) for launch in recording.launches if launch.eager is not None}
    if not calls:
        return frozenset()
    pool = (slot for slot in slots if slot.kind is AllocationKind.POOL)
    return frozenset(slot.index for slot in pool if slot.launch in calls and slot.word >= calls[slot.launch])
