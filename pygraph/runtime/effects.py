"""What a capture's accesses say about its arguments and allocations: which are written, and whether all stay inside.

Pure questions over a Recording and its slots. Order between launches is ``ordering``'s subject.
"""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.runtime.driver import Slot
from pygraph.runtime.recording import AllocationKind, Recording
from pygraph.runtime.refusal import Refusal

__all__ = ["collective", "outside", "written_arguments"]

_COLLECTIVES = ("_c10d_functional", "c10d", "_dtensor", "nccl")
"""How the names of launches that talk to other processes begin."""


def collective(recording: Recording) -> Refusal | None:
    """The first launch that talks to other processes (``collective``), or None.

    Such a region cannot be compared: it would run more often here than elsewhere.
    """
    for launch in recording.launches:
        if launch.name.startswith(_COLLECTIVES):
            return Refusal.at(launch, "collective", "a replay cannot be compared where other processes take part")
    return None


def written_arguments(recording: Recording, slots: Sequence[Slot]) -> frozenset[int]:
    """Positions of the arguments that a launch may write: exact where accesses are known, else all that it is given
    and that is not known to be read only."""
    written: set[int] = set()
    for slot in slots:
        if slot.kind is not AllocationKind.INPUT or slot.index in written:
            continue
        launch = recording.launches[slot.launch]
        unknown = launch.accesses is None and (slot.kind, slot.index) not in launch.read_only
        if unknown or any(a.writes and a.word == slot.word for a in launch.accesses or ()):
            written.add(slot.index)
    return frozenset(written)


def outside(recording: Recording, slots: Sequence[Slot]) -> Refusal | None:
    """The first known access that leaves its allocation (``outside-allocation``), or None."""
    sizes = {a.key: a.nbytes for a in recording.allocations}
    places = {(slot.launch, slot.word): slot for slot in slots}
    for launch in recording.launches:
        for access in launch.accesses or ():
            slot = places.get((launch.index, access.word))
            if slot is None or not access.nbytes:
                continue
            start = slot.offset + access.start
            if start < 0 or start + access.nbytes > sizes[(slot.kind, slot.index)]:
                reach = f"word {access.word} reaches bytes {start} to {start + access.nbytes}"
                where = f"{reach} of {slot.kind.value} {slot.index}"
                return Refusal.at(launch, "outside-allocation", where)
    return None
