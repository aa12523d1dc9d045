"""Renaming of allocations that calls overwrite completely: it undoes Inductor's reuse of buffers.

    k0 writes a    k1 reads a    k2 writes a    k3 reads a          k0 ─ k1 ─ k2 ─ k3
    k0 writes a'   k1 reads a'   k2 writes a    k3 reads a          k0 ─ k1   beside   k2 ─ k3

Inductor lets a buffer reuse the memory of one that is no longer needed. Unrelated launches then wait for each other. A
call that overwrites all used bytes of an allocation, and reads none of them, starts a new life of that memory: words
of earlier calls now point to a new allocation. The last calls keep the original allocation, which an output may show.
Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from pygraph.program.program import Slot, used_by_calls
from pygraph.program.recording import Access, AllocationKind, Bytes, Launch, Recording

_Key = tuple[AllocationKind, int]
POOL = AllocationKind.POOL


def rename(recording: Recording, slots: Sequence[Slot]) -> tuple[Recording, tuple[Slot, ...], int]:
    """``recording`` and ``slots`` with renamed allocations, and the number of new allocations. Allocations of operands
    and results of eager calls are not renamed."""
    sizes = {allocation.index: allocation for allocation in recording.allocations if allocation.kind is POOL}
    calls, kept = recording.calls(), used_by_calls(recording, slots)
    users: dict[int, dict[range, None]] = {}
    for slot in sorted(slots, key=lambda slot: calls[slot.launch].start):
        if slot.kind is POOL and slot.index not in kept:
            users.setdefault(slot.index, {})[calls[slot.launch]] = None
    words = {(slot.launch, slot.word): slot for slot in slots}
    made, names = list(recording.allocations), dict[tuple[int, int], int]()
    for index, spans in users.items():
        edges = [0, *_beginnings(recording, words, (POOL, index), list(spans)), len(spans)]
        for begin, end in list(pairwise(edges))[:-1]:
            number = max(sizes) + 1 + len(made) - len(recording.allocations)
            part = list(spans)[begin:end]
            names.update({(launch, index): number for span in part for launch in span})
            made.append(replace(sizes[index], index=number))
    if not names:
        return recording, tuple(slots), 0
    moved = {launch for launch, _ in names}
    launches = (_renamed(each, names) if each.index in moved else each for each in recording.launches)
    changed = replace(recording, launches=tuple(launches), allocations=tuple(made))
    named = [  # few of many; ``replace`` for all would take as long as everything else
        Slot(slot.launch, slot.word, POOL, names[slot.launch, slot.index], slot.offset)
        if slot.kind is POOL and (slot.launch, slot.index) in names
        else slot
        for slot in slots
    ]
    return changed, tuple(named), len(made) - len(recording.allocations)


def _beginnings(
    recording: Recording, words: Mapping[tuple[int, int], Slot], key: _Key, spans: Sequence[range]
) -> list[int]:
    """Numbers of the calls ``spans``, which use an allocation, that start a new life of it; never the first."""
    found = [_accesses(recording, words, key, span) for span in spans]
    if None in found[1:]:
        reach = next(a.nbytes for a in recording.allocations if a.key == key)
    else:
        reach = max((access.bytes.end for accesses in found for access in accesses or ()), default=0)
    whole, beginnings = Bytes(0, reach), list[int]()
    stops = accumulate((span.stop for span in spans), max)
    for number, (before, stop) in enumerate(zip(pairwise(spans), stops), 1):  # noqa: B905
        earlier, span = before
        accesses = found[number]
        if accesses is None or span.start < stop or any(access.reads for access in accesses):
            continue
        one, other = (recording.launches[each.start].operands for each in (earlier, span))
        if other is not None and one == other:  # perhaps both of one call, which has these operands
            continue
        if any(access.writes and access.bytes.covers(whole) for access in accesses):
            beginnings.append(number)
    return beginnings


def _accesses(
    recording: Recording, words: Mapping[tuple[int, int], Slot], key: _Key, span: range
) -> list[Access] | None:
    """Accesses of the call of ``span`` to the allocation ``key``; None if unknown."""
    launches = recording.launches[span.start : span.stop]
    first = launches[0]
    if len(launches) == 1 and first.uses is not None:
        places = [(use, words.get((first.index, use.word))) for use in first.uses]
        return [
            Access(key, Bytes(start := slot.offset + use.start, start + use.nbytes), use.writes, use.reads)
            for use, slot in places
            if slot is not None and slot.key == key
        ]
    given = [access for access in first.operands or () if access.key == key]
    return given if given and all(launch.operands == first.operands for launch in launches) else None


def _renamed(launch: Launch, names: Mapping[tuple[int, int], int]) -> Launch:
    """``launch`` with new ``names`` (launch, allocation ▸ allocation) of the memory that it accesses."""

    def name(key: _Key) -> _Key:
        return (key[0], names.get((launch.index, key[1]), key[1])) if key[0] is POOL else key

    operands = launch.operands and tuple(replace(access, key=name(access.key)) for access in launch.operands)
    may_access = launch.may_access and frozenset(map(name, launch.may_access))
    read_only = frozenset(map(name, launch.read_only))
    return replace(launch, operands=operands, may_access=may_access, read_only=read_only)
