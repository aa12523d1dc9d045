"""Which kernels are proven: a capture of nothing else is used without being compared.

    size 4    captured twice, compared     its kernels are proven, and which of their words are addresses
    size 6    captured once                the same kernels, depending on each other alike: replayed at once
    size 8    captured twice, compared     a matrix product chose a kernel that the region never had

A kernel is proven once a replay that contained it was judged right in this region. That shows that the words which were
patched are all of its addresses, and that it does nothing which a replay leaves out. Both follow from its code, and not
from sizes. What depends on sizes is read from each capture anew: numbers, grids, which allocation each address lies in,
what each launch uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pygraph.program.dependences import order_of
from pygraph.program.program import NonPointerWord, Program, Slot
from pygraph.program.recording import Allocation, AllocationKind, Launch, Recording
from pygraph.runtime.slots import AddressMap, SlotTable, foreign, sequence

__all__ = ["Proof"]


class Proof:
    """The kernels that are proven in one region, and how launches of them depended on each other."""

    def __init__(self) -> None:
        self._addresses: dict[Hashable, set[frozenset[int]]] = {}
        """By kernel, the words that were addresses in one of its launches: an operand may be missing in some."""
        self._structures: set[Hashable] = set()

    def add(self, program: Program) -> None:
        """A replay of ``program`` was judged right."""
        for launch, words in zip(program.recording.launches, _patched(program), strict=True):
            self._addresses.setdefault(_kernel(launch), set()).add(words)
        self._structures.add(_structure(program))

    def covers(self, program: Program) -> bool:
        """True if a replay of ``program`` need not be compared: its kernels are proven and depend on each other as they
        did before. Operators that may keep a state of their own are never proven."""
        launches = program.recording.launches
        if program.recording.python or not all(map(_is_closed, launches)):
            return False
        pairs = zip(launches, _patched(program), strict=True)
        known = all(words in self._addresses.get(_kernel(launch), ()) for launch, words in pairs)
        return known and _structure(program) in self._structures

    def resolve(self, recording: Recording, memory: Sequence[Allocation] = ()) -> SlotTable | None:
        """The slots of a single capture of proven kernels.

        None, so that it is captured once more, where a kernel is new, or its addresses are not the words that they were
        before; where a word points to no single place; and where any other word could be an address of this capture's,
        or of the ``memory`` of somebody else. Words that lie elsewhere are inert as in ``discover``.
        """
        addresses, others = AddressMap(recording.allocations), AddressMap(memory)
        if addresses.overlap is not None:
            return None
        slots: list[Slot] = []
        non_pointers: list[NonPointerWord] = []
        for launch in recording.launches:
            proven, found = self._addresses.get(_kernel(launch)), len(slots)
            if proven is None:
                return None
            for position, word in enumerate(launch.words):
                places = addresses.places(word, launch.index)
                if places:
                    if len(places) > 1:
                        return None
                    slots.append(Slot(launch.index, position, *places[0].key, places[0].offset))
                    continue
                inert = foreign(launch, position)
                if isinstance(inert, NonPointerWord):
                    non_pointers.append(inert)
                elif inert is not None or addresses.inside(word) or others.inside(word):
                    return None
            words = frozenset(slot.word for slot in slots[found:])
            missing = frozenset().union(*proven) - words  # null, or an address of what nobody knows
            if words not in proven or any(launch.words[position] for position in missing):
                return None
        return SlotTable(tuple(slots), (), sequence(recording), tuple(non_pointers))


def _kernel(launch: Launch) -> Hashable:
    """All that is the same in each launch of a kernel."""
    return launch.kind, launch.name, launch.code, len(launch.words)


def _is_closed(launch: Launch) -> bool:
    """True if a launch is known to do nothing but to what it is given, so that it has no state of its own."""
    return launch.uses is not None or launch.operands is not None or launch.eager is not None


def _patched(program: Program) -> list[frozenset[int]]:
    """For each launch, the words that are addresses."""
    words: list[set[int]] = [set() for _ in program.recording.launches]
    for slot in program.slots:
        words[slot.launch].add(slot.word)
    return list(map(frozenset, words))


def _structure(program: Program) -> Hashable:
    """What each launch is given, with intermediates numbered as they are met; and which launches wait for which."""
    given: dict[int, set[tuple[str, int]]] = {}
    met: dict[int, int] = {}
    for slot in program.slots:
        index = met.setdefault(slot.index, len(met)) if slot.kind is AllocationKind.POOL else slot.index
        given.setdefault(slot.launch, set()).add((slot.kind.value, index))
    operands = tuple((launch, frozenset(keys)) for launch, keys in given.items())
    waits = program.recording.phases if program.order is None else program.order.edges
    return operands, waits, order_of(program.recording, program.slots).edges
