"""Launches that own bodies: loops and branches, decided on the device.

    l0 = while "loop" (%arg2 updates, %buf0 updates, %arg0 updates, %arg1 reads)
                       word 0          word 1         word 2         word 3
      body program { %arg0, %arg1: arguments    %buf0, …: in the workspace of its layout    one segment }

Word 0 points to the deciding bytes; word 1 to the workspace, which all bodies share; word ``ARGUMENTS + k`` to argument
k of each body; further words to constants that they use. A branch runs its first body if a byte is not 0. A loop has
three 64-bit integers, ``count``, ``limit`` and ``stop``: while ``count < limit`` and ``stop`` is 0, it runs its body
and counts. A body is a program of its own: it does not refer to memory of the surrounding program, and returns nothing.
The launch uses all memory that its bodies use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pygraph.program.program import Program, Slot
from pygraph.program.recording import Access, AllocationKind, Launch, LaunchKind

DECIDES, WORKSPACE, ARGUMENTS = 0, 1, 2
"""Words of a launch with bodies: the deciding bytes, the workspace, and the first argument."""

CONTROL = 24
"""Bytes that decide on a loop: three 64-bit integers."""


def decided_by(kind: LaunchKind) -> int:
    """Number of bytes that decide on a launch of this ``kind``, which owns bodies."""
    return CONTROL if kind is LaunchKind.WHILE else 1


_Key = tuple[AllocationKind, int]

Path = tuple[int, ...]
"""Path of a launch: its number; within a body, after the path of the owning launch and the body's number."""


def bodies_of(program: Program) -> Iterator[Program]:
    """All bodies within ``program``, including bodies of bodies."""
    for launch in program.recording.launches:
        for body in launch.bodies:
            yield body
            yield from bodies_of(body)


def has_order(program: Program) -> bool:
    """True if ``program``, or a body within it, has an order by dependences."""
    return any(inner.order is not None for inner in (program, *bodies_of(program)))


def launches_of(program: Program, path: Path = ()) -> Iterator[tuple[Path, Program, Launch]]:
    """All launches of ``program``, each before those of its bodies, as (path, program around it, launch)."""
    for launch in program.recording.launches:
        yield (*path, launch.index), program, launch
        for number, body in enumerate(launch.bodies):
            yield from launches_of(body, (*path, launch.index, number))


def words_at(program: Program, slot: Slot, path: Path = ()) -> Iterator[tuple[Path, int, int]]:
    """The words that hold the address of ``slot``, also within bodies, as (path of the launch, word, offset in bytes
    into the slot's allocation)."""
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
    """Offset in bytes of an allocation of ``body`` from the address in ``word`` of its launch; None if that word does
    not lead to the allocation."""
    if key[0] is AllocationKind.INPUT:
        return 0 if word == ARGUMENTS + key[1] else None
    return body.layout.offsets.get(key[1]) if word == WORKSPACE else None


def outside(body: Program, access: Access, slots: dict[int, Slot]) -> Access | None:
    """Map ``access`` of a body to its launch, whose words have ``slots``; None if no word leads there."""
    word = ARGUMENTS + access.key[1] if access.key[0] is AllocationKind.INPUT else WORKSPACE
    begin, slot = owned_at(body, word, access.key), slots.get(word)
    if begin is None or slot is None:
        return None
    return replace(access, key=slot.key, bytes=access.bytes.moved(slot.offset + begin))
