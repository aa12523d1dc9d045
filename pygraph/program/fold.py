"""Moves captured launches of loops and branches into bodies.

captured:  l0   l1 l2   l3   l4        l1 l2 if a byte is not 0, else l3
folded:    l0   l1 = if { l0 l1 } else { l0 }   l2

A capture runs each body once, one after the other, and records the launches of each (``recording.Nest``). Memory that
a body shares with other launches becomes an argument; memory that only it uses lies in the workspace of its launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from pygraph.errors import CaptureError
from pygraph.program.copies import without_copies
from pygraph.program.default import LaunchPasses, undecided
from pygraph.program.loops import as_body, owner_of
from pygraph.program.nested import decided_by
from pygraph.program.program import Program, Slot
from pygraph.program.recording import Allocation, AllocationKind, Launch, Nest, Payload, Recording

_Key = tuple[AllocationKind, int]
_INPUT, _POOL, _CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT

_GAP = 4096
"""Minimum number of bytes between the address of a workspace and any other memory."""


def folded(program: Program, passes: LaunchPasses, order: str) -> Program:
    """An undecided ``program`` with its loops and branches in bodies, which ``passes`` have decided. Raises
    CaptureError (``control-flow``) for bodies that need the host."""
    waiting = list(program.recording.nests)
    while waiting:  # an inner one comes before the one around it
        nest = waiting.pop(0)
        program = _folded(program, nest, passes, order)
        waiting = [replace(each, bounds=tuple(_behind(nest, at) for at in each.bounds)) for each in waiting]
    return replace(program, recording=replace(program.recording, nests=()))


def _behind(nest: Nest, launch: int) -> int:
    """New number of a launch, or of an end, after ``nest`` has become one launch."""
    begin, end = nest.bounds[0], nest.bounds[-1]
    return launch if launch <= begin else launch - (end - begin) + 1


def _folded(program: Program, nest: Nest, passes: LaunchPasses, order: str) -> Program:
    """``program`` with one launch in place of the launches of ``nest``."""
    recording, begin, end = program.recording, nest.bounds[0], nest.bounds[-1]
    parts = [range(*each) for each in pairwise(nest.bounds)]
    owners = {allocation.key: allocation for allocation in recording.allocations}
    numbers = {key: number for number, key in enumerate(_shared(program, parts))}
    own = frozenset(number for key, number in numbers.items() if key[0] is _POOL)
    bodies = [
        as_body(passes(without_copies(_undecided(program, part, numbers), own), order), "control-flow")
        for part in parts
    ]
    decides = _deciding(recording, nest)
    deciding = owners[decides.key]
    memory = _workspace(recording, max(body.layout.nbytes for body in bodies), begin)
    part = replace(deciding, address=deciding.address + decides.offset, nbytes=decided_by(nest.kind))
    given = [part, memory, *(owners[key] for key in numbers)]
    constants = [each for each in recording.allocations if each.kind is _CONSTANT]
    made = owner_of(nest.kind, nest.kind.value, bodies, given, constants)
    launches = [*recording.launches[:begin], made, *recording.launches[end:]]
    slots = [replace(s, launch=_behind(nest, s.launch)) for s in program.slots if not begin <= s.launch < end]
    slots.append(replace(decides, launch=begin))
    slots += [Slot(begin, word, *e.key, 0) for word, e in enumerate(given) if word and e is not None and e.nbytes]
    inert = [replace(w, launch=_behind(nest, w.launch)) for w in program.non_pointers if not begin <= w.launch < end]

    def born(each: Allocation) -> int:
        return min(each.born, begin) if each.key in numbers or each.born < end else _behind(nest, each.born)

    changed = replace(
        recording,
        launches=tuple(replace(launch, index=index) for index, launch in enumerate(launches)),
        allocations=(
            *(replace(each, born=born(each)) for each in recording.allocations),
            *([] if memory is None else [memory]),
        ),
        payload=_part(recording, [*range(begin), None, *range(end, len(recording.launches))]),
        phases=(),
    )
    facts = {"held": program.held, "lent": program.lent, "name": program.name, "alignment": program.alignment}
    return undecided(changed, tuple(slots), non_pointers=tuple(inert), **facts)


def _shared(program: Program, parts: Sequence[range]) -> list[_Key]:
    """Memory of bodies that other bodies or launches use as well, that is an argument's, or that the region returns."""
    inside: dict[_Key, set[int]] = {}
    for slot in program.slots:
        part = next((number for number, part in enumerate(parts) if slot.launch in part), -1)
        inside.setdefault(slot.key, set()).add(part)
    returned = {program.recording.owner(output) for output in program.recording.outputs}
    used = {key: found for key, found in inside.items() if found != {-1}}
    shared = [key for key, found in used.items() if len(found) > 1 or key[0] is _INPUT or key in returned]
    return sorted(shared, key=lambda key: (key[0].value, key[1]))


def _undecided(program: Program, part: range, numbers: Mapping[_Key, int]) -> Program:
    """The launches of ``part`` as a program of its own, with its shared memory as arguments, by ``numbers``."""
    recording = program.recording
    slots = [slot for slot in program.slots if slot.launch in part]
    names = {slot.key: (_INPUT, numbers[slot.key]) if slot.key in numbers else slot.key for slot in slots}
    names |= {each.key: each.key for each in recording.allocations if each.kind is _CONSTANT}
    allocations = [
        replace(
            each,
            kind=names[each.key][0],
            index=names[each.key][1],
            born=0 if each.key in numbers else max(each.born - part.start, 0),  # copies that go are written earlier
        )
        for each in recording.allocations
        if each.key in names
    ]
    body = replace(
        recording,
        launches=tuple(_named(recording.launches[at], at - part.start, names) for at in part),
        allocations=tuple(allocations),
        outputs=(),
        payload=_part(recording, part),
        offset_sensitive=frozenset(),
        phases=(),
        python=(),
        nests=(),
    )
    moved = tuple(Slot(s.launch - part.start, s.word, *names[s.key], s.offset) for s in slots)
    inert = (replace(each, launch=each.launch - part.start) for each in program.non_pointers if each.launch in part)
    return undecided(body, moved, non_pointers=tuple(inert), alignment=program.alignment)


def _part(recording: Recording, launches: Sequence[int | None]) -> Payload | None:
    return recording.payload and recording.payload.part(launches)


def _named(launch: Launch, index: int, names: Mapping[_Key, _Key]) -> Launch:
    """``launch`` as number ``index``, with new ``names`` of the memory that it accesses."""
    operands = launch.operands
    if operands is not None:
        operands = tuple(replace(each, key=names[each.key]) for each in operands if each.key in names)
    may_access = launch.may_access
    if may_access is not None:
        may_access = frozenset(names[key] for key in may_access if key in names)
    read_only, in_place = (
        frozenset(names[key] for key in keys if key in names) for keys in (launch.read_only, launch.in_place)
    )
    return replace(
        launch, index=index, operands=operands, may_access=may_access, read_only=read_only, in_place=in_place
    )


def _deciding(recording: Recording, nest: Nest) -> Slot:
    """Slot of word 0, the deciding bytes. Raises CaptureError (``control-flow``) if no allocation holds them."""
    nbytes = decided_by(nest.kind)
    for each in recording.allocations:
        if each.kind is not _CONSTANT and each.address <= nest.decides <= each.address + each.nbytes - nbytes:
            return Slot(0, 0, *each.key, nest.decides - each.address)
    raise CaptureError("control-flow", f"the condition of a {nest.kind.value} lies in memory that is no capture's")


def _workspace(recording: Recording, nbytes: int, born: int) -> Allocation | None:
    """Memory of ``nbytes`` for intermediates of bodies, at unused addresses; None for 0 bytes."""
    if not nbytes:
        return None
    taken = recording.allocations
    index = 1 + max((each.index for each in taken if each.kind is _POOL), default=-1)
    behind = max((each.address + each.nbytes for each in taken if each.kind is not _CONSTANT), default=0)
    address = -(-(behind + _GAP) // recording.alignment) * recording.alignment
    return Allocation(_POOL, index, address, nbytes, born)
