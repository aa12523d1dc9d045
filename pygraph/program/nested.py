"""Launches that own bodies: loops and branches, which the device decides on.

    l0 = while "loop" (%arg2 updates, %buf0 updates, %arg0 updates, %arg1 reads)
                       word 0          word 1         word 2         word 3
      body program { %arg0, %arg1: arguments    %buf0, …: in the workspace of its layout    one segment }

Word 0 points to what decides; word 1 to the workspace, which all bodies share; word ``ARGUMENTS + k`` to argument k of
each body; further words to constants that they use. A branch runs its first body if a byte is not 0. A loop has three
64-bit integers, ``count``, ``limit`` and ``stop``: while ``count < limit`` and ``stop`` is 0, it runs its body and
counts. A body is a program by itself: it names none of the
memory of the program around it, and returns nothing. What the launch uses is what its bodies use together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pygraph.program.program import Program, Slot
from pygraph.program.recording import Access, AllocationKind, Launch, LaunchKind

DECIDES, WORKSPACE, ARGUMENTS = 0, 1, 2
"""The words of a launch with bodies: of what decides, of the workspace, and the first one of an argument."""

CONTROL = 24
"""Bytes that a loop is decided by; one of a branch."""


def decided_by(kind: LaunchKind) -> int:
    """How many bytes decide on a launch of a ``kind`` that owns bodies."""
    return CONTROL if kind is LaunchKind.WHILE else 1


_Key = tuple[AllocationKind, int]

Path = tuple[int, ...]
"""A launch: its number; for one within a body, those of the launch that owns it, and of the body, come before that."""


def bodies_of(program: Program) -> Iterator[Program]:
    """All bodies within ``program``, those of bodies among them."""
    for launch in program.recording.launches:
        for body in launch.bodies:
            yield body
            yield from bodies_of(body)


def has_order(program: Program) -> bool:
    """True if launches of ``program``, or of a body within it, wait for those alone that they depend on."""
    return any(inner.order is not None for inner in (program, *bodies_of(program)))


def launches_of(program: Program, path: Path = ()) -> Iterator[tuple[Path, Program, Launch]]:
    """All launches of ``program``, each before those of its bodies, with the program that each is in."""
    for launch in program.recording.launches:
        yield (*path, launch.index), program, launch
        for number, body in enumerate(launch.bodies):
            yield from launches_of(body, (*path, launch.index, number))


def words_at(program: Program, slot: Slot, path: Path = ()) -> Iterator[tuple[Path, int, int]]:
    """The words (launch, word) that hold the address of ``slot``, also within bodies, and how many bytes behind the
    begin of its allocation each points."""
    return _words(program, slot, slot.offset, path)


def _words(program: Program, slot: Slot, offset: int, path: Path) -> Iterator[tuple[Path, int, int]]:
    launch = program.recording.launches[slot.launch]
    if not launch.bodies or slot.word == DECIDES:
        yield (*path, launch.index), slot.word, offset
        return
    for number, body in enumerate(launch.bodies):
        for inner in body.slots:
            begin = owned_at(body, slot.word, inner.key)
            if begin is not None:
                yield from _words(body, inner, offset + begin + inner.offset, (*path, launch.index, number))


def owned_at(body: Program, word: int, key: _Key) -> int | None:
    """How many bytes behind where ``word`` of its launch points an allocation of ``body`` begins; None if it has
    nothing to do with that word."""
    if key[0] is AllocationKind.INPUT:
        return 0 if word == ARGUMENTS + key[1] else None
    return body.layout.offsets.get(key[1]) if word == WORKSPACE else None


def outside(body: Program, access: Access, slots: dict[int, Slot]) -> Access | None:
    """Map ``access`` of a body to its launch, whose words have ``slots``; None where no word leads there."""
    word = ARGUMENTS + access.key[1] if access.key[0] is AllocationKind.INPUT else WORKSPACE
    begin, slot = owned_at(body, word, access.key), slots.get(word)
    if begin is None or slot is None:
        return None
    return replace(access, key=slot.key, bytes=access.bytes.moved(slot.offset + begin))
