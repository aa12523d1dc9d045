"""Where intermediates lie at replay: lifetimes from the slots, packed into one workspace.

Pure functions. Outputs are not placed (they are allocated anew for each call), nor is what an eager call is given or
returns, nor what no launch touches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pygraph.runtime.contract import Layout, Order, Slot, returned_by_calls, used_by_calls
from pygraph.runtime.recording import AllocationKind, OutputKind, Recording

__all__ = ["Lifetime", "lifetimes", "pack", "plan"]


_STRETCH = 256
"""Launches that are looked at together, where intermediates are packed: a program may have thousands."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """An intermediate of ``nbytes`` that is needed from launch ``first`` to ``last`` (both included). In a partial
    order, the bits of ``users`` are the launches that use it, and those of ``before`` the ones that complete before any
    of these starts."""

    index: int
    nbytes: int
    first: int
    last: int
    users: int = 0
    before: int = 0

    def meets(self, other: Lifetime) -> bool:
        """Whether both may be alive at once."""
        if self.users:
            return bool(self.users & ~other.before) and bool(other.users & ~self.before)
        return self.first <= other.last and other.first <= self.last

    @property
    def earliest(self) -> int:
        """The first launch that may not have completed before, or ``first`` where launches run one by one."""
        return (self.before ^ (self.before + 1)).bit_length() - 1 if self.users else self.first


def plan(recording: Recording, slots: Sequence[Slot], order: Order | None = None) -> Layout:
    """Place every intermediate. Those that are never alive together may share bytes, however launches overlap that
    ``order`` leaves open (None: those of one phase). What an eager call is given has a storage of its own: it may hold
    on to that, or use it on another stream.
    """
    outputs = {o.index for o in recording.outputs if o.kind is OutputKind.FRESH}
    fresh = tuple(sorted((outputs | used_by_calls(recording, slots)) - returned_by_calls(recording, slots)))
    return pack(lifetimes(recording, slots, fresh, order), recording.alignment, fresh)


def lifetimes(
    recording: Recording, slots: Sequence[Slot], fresh: Collection[int], order: Order | None = None
) -> tuple[Lifetime, ...]:
    """How long each POOL allocation in the workspace is needed: those that a launch touches, and that are neither in
    ``fresh`` nor returned by eager calls. From the first call that uses it to the last. Where these lie in phases of
    several launches, all along these phases, as no order holds in them. In an ``order``, each by the launches of the
    calls that use it."""
    sizes = {a.index: a.nbytes for a in recording.allocations if a.kind is AllocationKind.POOL}
    phases = (recording.phases if order is None else ()) or range(len(recording.launches))
    spans: dict[int, tuple[int, int]] = {}
    users: dict[int, int] = {}
    before: dict[int, int] = {}
    elsewhere = returned_by_calls(recording, slots).union(fresh)
    calls = recording.calls()
    placed = (slot for slot in slots if slot.kind is AllocationKind.POOL and slot.index not in elsewhere)
    for index, call in dict.fromkeys((slot.index, calls[slot.launch]) for slot in placed):
        begin = bisect_left(phases, phases[call.start])
        end = bisect_right(phases, phases[call.stop - 1]) - 1
        first, last = spans.get(index, (begin, end))
        spans[index] = (min(first, begin), max(last, end))
        if order is not None:
            for launch in call:
                users[index] = users.get(index, 0) | 1 << launch
                before[index] = before.get(index, -1) & order.before[launch]
    return tuple(Lifetime(i, sizes[i], *spans[i], users.get(i, 0), before.get(i, 0)) for i in sorted(spans))


def pack(lives: Sequence[Lifetime], alignment: int, fresh: tuple[int, ...] = ()) -> Layout:
    """A layout of ``lives`` at multiples of ``alignment`` bytes. The largest is placed first, each in the smallest gap
    among its contemporaries; equal sizes in order of birth, for which first-fit is optimal on intervals."""
    sizes = {life.index: -(-life.nbytes // alignment) * alignment for life in lives}
    offsets: dict[int, int] = {}
    placed: defaultdict[int, list[tuple[int, int, int, int, int, Lifetime]]] = defaultdict(list)
    """By stretches of _STRETCH launches; -1: all of them."""
    for life in sorted(lives, key=lambda item: (-sizes[item.index], item.first, item.index)):
        size, (begin, end, since) = sizes[life.index], (life.first, life.last, life.earliest)
        stretches = range(since // _STRETCH, end // _STRETCH + 1)
        taken = [  # plain numbers tell of nearly all
            (low, high)
            for low, high, first, last, earliest, other in placed[stretches[0] if len(stretches) == 1 else -1]
            if (first <= end and last >= begin) or (earliest <= end and last >= since and other.meets(life))
        ]
        offset = offsets[life.index] = _best_gap(taken, size)
        if size:
            place = (offset, offset + size, begin, end, since, life)
            for stretch in (-1, *stretches):
                insort(placed[stretch], place, key=lambda item: item[:2])
    return Layout(max((place[1] for place in placed[-1]), default=0), offsets, fresh)


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
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
