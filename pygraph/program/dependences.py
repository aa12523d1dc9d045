"""True dependences between launches, by the bytes that they use.

    k0 writes a[0:64]     k1 writes a[64:128]     k2 reads a           k0 ─┬─ k2, and k0 beside k1
                                                                       k1 ─┘

A launch waits for earlier ones that write what it uses, and for earlier ones that use what it writes. Launches that
draw random numbers keep their order, and so do those that talk to other ranks. A launch with unknown accesses waits for
all earlier ones, and all later ones wait for it. Pure functions over a Recording and its slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pygraph.program.order import Order, levels
from pygraph.program.program import Slot
from pygraph.program.recording import Access, AllocationKind, Bytes, Launch, Recording
from pygraph.waits import Waits

_Key = tuple[AllocationKind, int]

_CROSSING = 0.5
"""Delay, in launches, of a launch that waits for one in another lane. With 0.25 or 0.75, the suite's models have nearly
the same lanes."""

_FIXED: _Key = (AllocationKind.CONSTANT, -1)
"""Memory that never moves, from address 0 on: constants may be views of one another."""


def order_of(recording: Recording, slots: Sequence[Slot]) -> Order:
    """The true dependences of the launches of ``recording``."""
    table: Waits[_Key] = Waits()
    waits: list[set[int]] = []
    for launch, accesses in zip(recording.launches, accesses_of(recording, slots), strict=True):
        used = None if accesses is None else [(access.key, access.bytes, access.writes) for access in accesses]
        waits.append(table.add(launch.index, used, chains(launch)))
    return Order.of(waits)


def chains(launch: Launch) -> list[str]:
    """Chains of ``launch``, whose members keep their order: random draws, functional collectives."""
    return ["random"] * launch.random + ["collective"] * launch.functional


def in_lanes(order: Order, most: int) -> Order:
    """``order`` in at most ``most`` lanes: each launch also waits for the previous one of its lane.

    Launches are assumed to take equal time. Among the lanes in which a launch starts early enough not to lengthen the
    longest path, it goes after a launch for which it waits, or else where it leaves the shortest idle time. If there is
    no such lane, it goes where it starts first; a new lane is opened only if it starts earlier there.
    """
    rest = _rest(order)
    longest = max(rest, default=0)
    free, last = [0.0], [-1]
    ends: list[float] = []
    chosen: list[int] = []
    waits: list[set[int]] = []
    for launch, waited in enumerate(order.edges):
        ready: dict[int, float] = {}  # by lane: the end of the last launch there for which it waits
        for each in waited:
            ready[chosen[each]] = max(ready.get(chosen[each], 0), ends[each])
        starts = [
            max([idle, *(end + _CROSSING * (other != lane) for other, end in ready.items())])
            for lane, idle in enumerate([*free, 0.0][:most])
        ]
        late = longest - rest[launch]
        in_time = [lane for lane, end in enumerate(last) if starts[lane] + _CROSSING * (end not in waited) <= late]
        if in_time:
            lane = max(in_time, key=lambda each: (last[each] in waited, free[each]))
        else:
            lane = min(range(len(starts)), key=lambda each: (starts[each], each == len(free), -[*free, 0.0][each]))
        if lane == len(free):
            free.append(0.0)
            last.append(-1)
        waits.append({*waited, last[lane]} - {-1})
        free[lane] = starts[lane] + 1
        last[lane] = launch
        ends.append(free[lane])
        chosen.append(lane)
    return Order.of(waits, chosen)


def _rest(order: Order) -> list[int]:
    """For each launch, the number of launches on the longest path from it, itself included."""
    last = len(order.edges) - 1
    behind: list[list[int]] = [[] for _ in order.edges]
    for launch, waited in enumerate(order.edges):
        for earlier in waited:
            behind[last - earlier].append(last - launch)
    return [level + 1 for level in reversed(levels(behind))]


def accesses_of(recording: Recording, slots: Sequence[Slot]) -> Iterator[list[Access] | None]:
    """Accesses of each launch; None: to any memory. Known ``uses`` are taken as they are. Any other launch accesses all
    memory to which words of its call point, since a kernel may leave addresses in memory for the next one: operands as
    declared, and all else as read and written. It also accesses constants among the operands, which have no slots."""
    places: dict[int, dict[int, Slot]] = {}
    for slot in slots:
        places.setdefault(slot.launch, {})[slot.word] = slot
    sizes = {allocation.key: allocation.nbytes for allocation in recording.allocations}
    fixed = {a.key: a.address for a in recording.allocations if a.kind is AllocationKind.CONSTANT}
    touched: dict[range, set[_Key]] = {}
    for launch, call in zip(recording.launches, recording.calls(), strict=True):
        if launch.eager is not None or (launch.uses is None and launch.operands is None):
            yield None
        elif launch.uses is not None:
            yield [
                Access(key, Bytes(start + use.start, start + use.start + use.nbytes), use.writes)
                for use in launch.uses
                for key, start in (_place(launch.words[use.word], places.get(launch.index, {}).get(use.word)),)
            ]
        else:
            if call not in touched:
                touched[call] = {slot.key for index in call for slot in places.get(index, {}).values()}
            given = [a for a in launch.operands or () if a.key in touched[call] or a.key in fixed]
            others = touched[call].difference(a.key for a in given)
            given = [Access(_FIXED, a.bytes.moved(fixed[a.key]), a.writes) if a.key in fixed else a for a in given]
            yield given + [Access(key, Bytes(0, sizes[key]), writes=True) for key in sorted(others, key=str)]


def _place(word: int, slot: Slot | None) -> tuple[_Key, int]:
    """The memory into which a word points, and the offset there."""
    return (_FIXED, word) if slot is None else (slot.key, slot.offset)
