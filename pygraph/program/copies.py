"""Results written directly to the target of their copy: LLVM's call slot optimization.

    l0 writes %buf0, of %arg0    l1 copies %buf0 to %arg0    l2 reads %arg0    ▸    l0 writes %arg0    l2 reads %arg0

An intermediate that is copied whole to a part of an argument becomes that part, if no other user of the part can
observe it: all of them come before the first launch of the intermediate, or after the copy. The first launch itself
may read the part if its ``Launch.in_place`` allows it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pygraph.program.dependences import accesses_of
from pygraph.program.program import Layout, Program, Slot, used_by_calls
from pygraph.program.recording import Access, AllocationKind, Bytes, Launch, LaunchKind, OutputKind, Recording
from pygraph.program.rename import rename

_Key = tuple[AllocationKind, int]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Launch ``launch`` copies all of an intermediate to the bytes ``there`` of an argument."""

    launch: int
    source: _Key
    target: _Key
    there: Bytes


def without_copies(program: Program, targets: Collection[int] | None = None) -> Program:
    """An undecided ``program`` without unnecessary copies to the arguments ``targets`` (None: any), none of which may
    share memory with another argument."""
    recording, slots, _ = rename(program.recording, program.slots)
    dropped = list[int]()
    for launch in recording.launches:
        copy = _copy_of(launch, recording, slots, program.alignment)
        wanted = copy is not None and (targets is None or copy.target[1] in targets)
        if copy is not None and wanted and _may_go(copy, recording, slots, dropped):
            recording, slots = _forwarded(copy, recording, slots)
            dropped.append(launch.index)
    if not dropped:
        return program
    recording, numbers = _without(recording, dropped)
    moved = tuple(replace(slot, launch=numbers[slot.launch]) for slot in slots if slot.launch not in dropped)
    others = (each for each in program.non_pointers if each.launch not in dropped)
    inert = tuple(replace(each, launch=numbers[each.launch]) for each in others)
    layout = Layout(0, {}, program.layout.fresh)
    return replace(program, recording=recording, slots=moved, non_pointers=inert, layout=layout, steps=())


def _copy_of(launch: Launch, recording: Recording, slots: Sequence[Slot], alignment: int) -> _Copy | None:
    """``launch`` as a copy of a whole intermediate to an equally aligned place in an argument; None for any other."""
    uses = {use.word: use for use in launch.uses or ()}
    if launch.kind is not LaunchKind.MEMCPY or uses.keys() != {0, 1}:
        return None
    words = {slot.word: slot for slot in slots if slot.launch == launch.index}
    to, source = words.get(0), words.get(1)
    if to is None or source is None or (to.kind, source.kind) != (AllocationKind.INPUT, AllocationKind.POOL):
        return None
    returned = {output.index for output in recording.outputs if output.kind is OutputKind.FRESH}
    allocations = {each.key: each for each in recording.allocations}
    target, whole, nbytes = allocations[to.key], allocations[source.key], uses[1].nbytes
    if source.index in returned | used_by_calls(recording, slots) or (source.offset, nbytes) != (0, whole.nbytes):
        return None
    if (target.address + to.offset - whole.address) % alignment:
        return None
    return _Copy(launch.index, source.key, to.key, Bytes(to.offset, to.offset + nbytes))


def _may_go(copy: _Copy, recording: Recording, slots: Sequence[Slot], dropped: Collection[int]) -> bool:
    """True if no launch can observe that the copied intermediate lies at its target from the beginning."""
    calls, when = recording.calls(), recording.phases or range(len(recording.launches))
    users = {slot.launch for slot in slots if slot.key == copy.source} - {copy.launch}
    if not users:
        return False
    begin = min(when[calls[user].start] for user in users)
    end = max(when[calls[user].stop - 1] for user in users)
    for launch, accesses in zip(recording.launches, accesses_of(recording, slots), strict=True):
        if launch.index == copy.launch or launch.index in dropped:
            continue
        call, copied = calls[launch.index], when[copy.launch]
        met = [a for a in accesses or () if a.key == copy.target and a.bytes.meets(copy.there)]
        changes = any(access.key == copy.source and access.writes for access in accesses or ())
        if changes and when[call.stop - 1] >= copied:
            return False
        if accesses is not None and not met:
            continue
        writes = accesses is None or any(access.writes for access in met)
        earlier = when[call.stop - 1] < begin
        later = when[call.start] > (max(copied, end) if writes else copied)
        if not (earlier or later or (accesses is not None and _is_in_place(launch, call, met, copy, begin, when))):
            return False
    return True


def _is_in_place(
    launch: Launch, call: range, met: Sequence[Access], copy: _Copy, begin: int, when: Sequence[int]
) -> bool:
    """True if ``launch`` is the first one of the copied intermediate, and may read the target that it overwrites."""
    alone = len(call) == 1 and [index for index, at in enumerate(when) if at == begin] == [launch.index]
    if not alone or copy.target not in launch.in_place:
        return False
    return all(access.bytes == copy.there and not access.writes for access in met)


def _forwarded(copy: _Copy, recording: Recording, slots: Sequence[Slot]) -> tuple[Recording, tuple[Slot, ...]]:
    """``recording`` and ``slots`` with the copied intermediate at its target. The copy itself remains."""
    calls, source, target, there = recording.calls(), copy.source, copy.target, copy.there
    address = next(each.address for each in recording.allocations if each.key == target) + there.start
    words: dict[int, dict[int, int]] = {}
    moved = list[Slot]()
    for slot in slots:
        if slot.key == source:
            words.setdefault(slot.launch, {})[slot.word] = address + slot.offset
            slot = replace(slot, kind=target[0], index=target[1], offset=there.start + slot.offset)
        moved.append(slot)
    users = {launch for user in words for launch in calls[user]}
    launches = [
        _moved(launch, copy, words.get(launch.index, {}), uses=launch.index in users) for launch in recording.launches
    ]
    allocations = tuple(each for each in recording.allocations if each.key != source)
    return replace(recording, launches=tuple(launches), allocations=allocations), tuple(moved)


def _moved(launch: Launch, copy: _Copy, words: Mapping[int, int], *, uses: bool) -> Launch:
    """``launch`` with new ``words``, and its accesses moved to the target. ``uses``: its call uses the intermediate."""
    source, target, there = copy.source, copy.target, copy.there
    operands, read_only, may_access = launch.operands, launch.read_only, launch.may_access
    if operands is not None:
        known = any(access.key == source for access in operands)
        operands = tuple(
            replace(access, key=target, bytes=access.bytes.moved(there.start)) if access.key == source else access
            for access in operands
        )
        if uses and not known:  # a result
            operands = (*operands, Access(target, there, writes=True))
    if source in read_only:
        read_only = read_only - {source} | {target}
    elif uses:
        read_only = read_only - {target}
    if may_access is not None and source in may_access:
        may_access = may_access - {source} | {target}
    in_place = launch.in_place - {source, target} if uses else launch.in_place - {source}
    return replace(
        launch,
        words=tuple(words.get(place, word) for place, word in enumerate(launch.words)),
        operands=operands,
        read_only=read_only,
        may_access=may_access,
        in_place=in_place,
    )


def _without(recording: Recording, dropped: Collection[int]) -> tuple[Recording, list[int]]:
    """``recording`` without the launches ``dropped``, and for each launch the number of kept ones before it."""
    gone = frozenset(dropped)
    kept = [index not in gone for index in range(len(recording.launches))]
    numbers = list(accumulate(map(int, kept), initial=0))
    launches = (replace(each, index=numbers[each.index]) for each in recording.launches if kept[each.index])
    allocations = (replace(each, born=numbers[each.born]) for each in recording.allocations)
    phases = tuple(phase for index, phase in enumerate(recording.phases) if kept[index])
    payload = recording.payload and recording.payload.part([i for i, keeps in enumerate(kept) if keeps])
    made = replace(recording, launches=tuple(launches), allocations=tuple(allocations), phases=phases, payload=payload)
    return made, numbers
