"""A launch program: a recording, which of its words are addresses, where memory lies, and the steps of a replay."""

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
    """A word that reads as an address, but is no operand's: a number, or bytes that nobody set. It stays as captured;
    with ``scratch``, it an address of scratch memory replaces it. ``call`` names the call that its launch came from."""

    launch: int
    word: int
    scratch: bool = False
    call: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where POOL allocations lie at replay: at ``offsets[index]`` bytes of one workspace of ``nbytes``; those of
    outputs, and of what eager calls are given (``fresh``), are allocated anew for each call."""

    nbytes: int
    offsets: dict[int, int]
    fresh: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Launches ``begin`` to ``end`` (excluded), which are replayed as one.

    Before it, memory is taken for ``blocks`` of intermediates (bytes, last step that uses it, and intermediate ▸ byte)
    and for the POOL allocations ``taken``, each with a storage of its own. After it, the allocations ``released`` and
    the arguments ``dead`` are let go of.
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
    """All that a driver needs to replay: the recording, which of its words are addresses, and where memory lies.

    Addresses of arguments stay congruent to the captured ones by ``alignment`` bytes, since kernels load vectors; an
    argument that is only read is copied otherwise. ``non_pointers`` are words that read as addresses and are no slots.
    Somebody else keeps the arguments ``held`` beyond the call, so that to let go of them early gains nothing, and those
    ``lent`` perhaps. ``name`` is what profilers call a replay. ``steps`` are what it does, in order;
    ``order`` is that of launches within one (None: as captured). ``notes`` are what passes said of it, for reports.
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
        from pygraph.program.text import print_program  # which knows programs

        return print_program(self)

    @property
    def calls(self) -> tuple[Launch, ...]:
        """The launches that are eager calls."""
        return tuple(launch for launch in self.recording.launches if launch.eager is not None)

    @property
    def written(self) -> frozenset[int]:
        """Positions of the arguments that a launch may write: exact where uses are known, else all that it is given and
        that is not known to be read only."""
        inputs, launches = [slot for slot in self.slots if slot.kind is AllocationKind.INPUT], self.recording.launches
        return frozenset(slot.index for slot in inputs if launches[slot.launch].may_write(slot.word, slot.key))


def used_by_calls(recording: Recording, slots: Sequence[Slot]) -> frozenset[int]:
    """The POOL allocations that eager calls are given or return."""
    calls = {launch.index for launch in recording.launches if launch.eager is not None}
    if not calls:
        return frozenset()
    return frozenset(slot.index for slot in slots if slot.kind is AllocationKind.POOL and slot.launch in calls)


def returned_by_calls(recording: Recording, slots: Sequence[Slot]) -> frozenset[int]:
    """Those that eager calls return: operators allocate that memory at each replay."""
    calls = {launch.index: len(launch.eager.operands) for launch in recording.launches if launch.eager is not None}
    if not calls:
        return frozenset()
    pool = (slot for slot in slots if slot.kind is AllocationKind.POOL)
    return frozenset(slot.index for slot in pool if slot.launch in calls and slot.word >= calls[slot.launch])
