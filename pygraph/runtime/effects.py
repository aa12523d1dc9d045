"""What a capture's accesses say about its arguments and allocations: which are written, which a non-deterministic
launch decides, and whether all accesses stay inside.

Pure questions over a Recording and its slots. Order between launches is ``ordering``'s subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pygraph.runtime.driver import Slot
from pygraph.runtime.recording import AllocationKind, Launch, Output, OutputKind, Recording
from pygraph.runtime.refusal import Refusal

__all__ = ["COLLECTIVES", "collective", "outside", "unrepeatable", "written_arguments"]

_Key = tuple[AllocationKind, int]

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})
"""Namespaces of operators that talk to other processes. A driver refuses them before they run."""

_KERNELS = ("ncclDevKernel", "ncclKernel", "nvshmem")
"""Parts of the names of kernels that do, which libraries may launch without any operator."""


def collective(recording: Recording) -> Refusal | None:
    """The first launch that talks to other processes (``collective``), or None.

    Such a region can be neither captured again nor compared: it would run more often here than elsewhere.
    """
    for launch in recording.launches:
        if launch.name.partition(".")[0] in COLLECTIVES or any(part in launch.name for part in _KERNELS):
            return Refusal.at(launch, "collective", "a replay cannot be compared where other processes take part")
    return None


def written_arguments(recording: Recording, slots: Sequence[Slot]) -> frozenset[int]:
    """Positions of the arguments that a launch may write: exact where accesses are known, else all that it is given
    and that is not known to be read only."""
    inputs = [slot for slot in slots if slot.kind is AllocationKind.INPUT]
    return frozenset(slot.index for slot in inputs if _writes(recording.launches[slot.launch], slot))


def unrepeatable(recording: Recording, slots: Sequence[Slot]) -> Callable[[Output | int], bool]:
    """Whether an output, or the argument at a position, may come out otherwise each time: a launch that is known to be
    non-deterministic writes it, or one that reads what such a launch wrote, and so on.

    A launch of unknown accesses reads all that it is given, and writes what it is not known to read only. What was
    once decided by such a launch counts as such for good, also where it is overwritten.
    """
    used: dict[int, list[Slot]] = {}
    for slot in slots:
        used.setdefault(slot.launch, []).append(slot)
    decided: set[_Key] = set()
    for launch in recording.launches:
        operands = used.get(launch.index, [])
        if launch.nondeterministic or any(_reads(launch, slot) and _key(slot) in decided for slot in operands):
            decided.update(_key(slot) for slot in operands if _writes(launch, slot))

    def is_decided(result: Output | int) -> bool:
        if isinstance(result, int):
            return (AllocationKind.INPUT, result) in decided
        if result.kind is OutputKind.FRESH:
            return (AllocationKind.POOL, result.allocation) in decided
        return (AllocationKind.INPUT, result.argument) in decided

    return is_decided


def _key(slot: Slot) -> _Key:
    return (slot.kind, slot.index)


def _reads(launch: Launch, slot: Slot) -> bool:
    """Whether ``launch`` may read what ``slot`` points to."""
    return launch.accesses is None or any(a.reads and a.word == slot.word for a in launch.accesses)


def _writes(launch: Launch, slot: Slot) -> bool:
    """Whether ``launch`` may write what ``slot`` points to."""
    if launch.accesses is None:
        return _key(slot) not in launch.read_only
    return any(a.writes and a.word == slot.word for a in launch.accesses)


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
