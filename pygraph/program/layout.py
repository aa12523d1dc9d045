"""Places of intermediates at replay: lifetimes from the slots, packed into one workspace.

Pure functions. Not placed are outputs (they are allocated for each call), operands and results of eager calls, and
allocations that no launch uses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, compress
from operator import and_, itemgetter, or_

from pygraph.program.order import Order
from pygraph.program.program import Layout, Slot, returned_by_calls, used_by_calls
from pygraph.program.recording import AllocationKind, OutputKind, Recording

_BITS = bytes.maketrans(b"01", b"\0\1")


@dataclass(frozen=True, slots=True)
class Lifetime:
    """An intermediate of ``nbytes`` that is needed from launch ``first`` to ``last`` (both included). In a partial
    order, the bits of ``met`` are the intermediates that may be alive at the same time, including itself."""

    index: int
    nbytes: int
    first: int
    last: int
    met: int = 0


def apart(lives: Iterable[Lifetime], alignment: int, fresh: tuple[int, ...] = ()) -> Layout:
    """A layout of ``lives`` that is valid in every order: no two intermediates share a byte."""
    end, offsets = 0, dict[int, int]()
    for life in lives:
        offsets[life.index] = end
        end += -(-life.nbytes // alignment) * alignment
    return Layout(end, offsets, fresh)


def own_storage(recording: Recording, slots: Sequence[Slot]) -> tuple[int, ...]:
    """The allocations of outputs and of operands of eager calls, except for results of these: a call may keep its
    operands, or use them on another stream."""
    outputs = {o.index for o in recording.outputs if o.kind is OutputKind.FRESH}
    return tuple(sorted((outputs | used_by_calls(recording, slots)) - returned_by_calls(recording, slots)))


def lifetimes(
    recording: Recording, slots: Sequence[Slot], fresh: Collection[int], order: Order | None = None
) -> tuple[Lifetime, ...]:
    """Lifetimes of the POOL allocations in the workspace: those that a launch uses, and that are neither in ``fresh``
    nor returned by eager calls. A lifetime lasts from the first call that uses the allocation to the last one, and over
    the whole phases of both, as launches within a phase have no order. With ``order``, phases are ignored, and
    ``met`` follows from the launches of the calls that use each allocation."""
    sizes = {a.index: a.nbytes for a in recording.allocations if a.kind is AllocationKind.POOL}
    phases = (recording.phases if order is None else ()) or range(len(recording.launches))
    elsewhere = returned_by_calls(recording, slots).union(fresh)
    calls = recording.calls()
    begins = [bisect_left(phases, phases[call.start]) for call in calls]
    ends = [bisect_right(phases, phases[call.stop - 1]) - 1 for call in calls]
    users: dict[int, set[int]] = {}
    for slot in slots:
        if slot.kind is AllocationKind.POOL and slot.index not in elsewhere:
            users.setdefault(slot.index, set()).add(slot.launch)
    met: Mapping[int, int] = {}
    if order is not None:
        met = _met({index: {each for one in used for each in calls[one]} for index, used in users.items()}, order)
    return tuple(
        Lifetime(
            index, sizes[index], min(begins[one] for one in used), max(ends[one] for one in used), met.get(index, 0)
        )
        for index, used in sorted(users.items())
    )


def _met(users: Mapping[int, Collection[int]], order: Order) -> dict[int, int]:
    """For each intermediate, by the launches that use it, the bits of those that may be alive at the same time: neither
    do all users of one complete before any user of the other starts, nor the other way round."""
    last, waits = len(order.edges) - 1, [set[int]() for _ in order.edges]
    for later, waited in enumerate(order.edges):
        for earlier in waited:
            waits[last - earlier].add(last - later)
    mirrored = {index: [last - launch for launch in launches] for index, launches in users.items()}
    unborn = _unfinished(mirrored, Order.of(waits, order.lanes[::-1]))
    return {index: met & unborn[index] for index, met in _unfinished(users, order).items()}


def _unfinished(users: Mapping[int, Collection[int]], order: Order) -> dict[int, int]:
    """For each intermediate, the bits of those used by launches that may not have completed before its own users start.
    Launches of a lane run one by one: these are all launches of a lane after the last one that surely has completed."""
    used = [0] * len(order.edges)
    for index, launches in users.items():
        for launch in launches:
            used[launch] |= 1 << index
    lanes = order.lanes or range(len(used))
    rest, masks = ([0] * (1 + max(lanes, default=0)) for _ in range(2))  # by lane: intermediates used, and its launches
    behind = [0] * (len(used) + 1)
    for launch in reversed(range(len(used))):
        lane = lanes[launch]
        behind[launch + 1] = rest[lane]
        rest[lane] |= used[launch]
        masks[lane] |= 1 << launch
    found: dict[int, int] = {}
    for index, launches in users.items():
        before = reduce(and_, [order.before[launch] for launch in launches])
        ends = [(mask & before).bit_length() for mask in masks]
        found[index] = reduce(or_, [behind[end] if end else whole for end, whole in zip(ends, rest, strict=True)])
    return found


def pack(lives: Sequence[Lifetime], alignment: int, fresh: tuple[int, ...] = ()) -> Layout:
    """A layout of ``lives`` at multiples of ``alignment`` bytes. The largest is placed first, each in the smallest gap
    among those alive with it; equal sizes in order of birth, for which first-fit is optimal on intervals."""
    sizes = {life.index: -(-life.nbytes // alignment) * alignment for life in lives}
    met = {life.index: life.met for life in lives if life.met} or _overlaps(lives)
    offsets: dict[int, int] = {}
    spans = [(0, 0)] * (max(sizes, default=0) + 1)
    places, there = list[tuple[int, int]](), list[int]()  # taken bytes, and the intermediates there
    placed = 0
    for life in sorted(lives, key=lambda item: (-sizes[item.index], item.first, item.index)):
        size, near = sizes[life.index], met[life.index] & placed
        if near.bit_count() < len(places):  # few of many: look up each
            skip = (near & -near).bit_length() - 1 if near else 0
            bits = f"{near >> skip:b}"[::-1].encode().translate(_BITS)
            taken: Iterable[tuple[int, int]] = sorted(compress(spans[skip : skip + len(bits)], bits), key=itemgetter(0))
        else:
            taken = compress(places, map(near.__and__, there))
        offset = offsets[life.index] = _best_gap(taken, size)
        if size:
            place = spans[life.index] = offset, offset + size
            at = bisect_left(places, place)
            if places[at : at + 1] != [place]:
                places.insert(at, place)
                there.insert(at, 0)
            there[at] |= 1 << life.index
            placed |= 1 << life.index
    return Layout(max((place[1] for place in places), default=0), offsets, fresh)


def _overlaps(lives: Sequence[Lifetime]) -> dict[int, int]:
    """For each intermediate, the bits of those alive at the same time, if launches run one by one."""
    count = max((life.last for life in lives), default=0) + 1
    begun, ended = [0] * count, [0] * (count + 1)
    for life in lives:
        begun[life.first] |= 1 << life.index
        ended[life.last + 1] |= 1 << life.index
    begun, ended = list(accumulate(begun, or_)), list(accumulate(ended, or_))
    return {life.index: begun[life.last] & ~ended[life.first] for life in lives}


def _best_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    """The start of the smallest gap of at least ``size`` bytes between ``taken`` (sorted), or their end."""
    best: tuple[int, int] | None = None
    cursor = 0
    for low, high in taken:
        gap = low - cursor
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, cursor)
        if high > cursor:
            cursor = high
    return cursor if best is None else best[1]
