"""The steps of a program: segments of launches, eager calls between them, and the memory that each takes and
releases.

One graph holds all of its arguments, outputs and intermediates at once, but the uncaptured program releases each
after its last use. A segment ends before an eager call. It also ends before it would hold notably more memory than the
peak of the uncaptured program; a region that holds little memory and has no eager calls is one segment. Pure functions
over a Program.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from pygraph.program.layout import Lifetime, lifetimes, pack
from pygraph.program.program import EagerStep, GraphSegment, Layout, Program, Step, returned_by_calls
from pygraph.program.recording import AllocationKind, OutputKind

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""The launches (begin, end) of each step, in order. Each eager call is a step of its own."""

WORTHWHILE = 32 << 20
"""Minimum number of bytes that cuts must save (32 MiB): for less memory, more launches are not worth their cost."""

EXCESS = 0.02
"""Fraction of the uncaptured program's peak by which segments may exceed it."""

FEWEST_LAUNCHES = 2
"""Minimum number of launches in a segment."""

MOST_SEGMENTS = 64
"""Maximum number of segments, besides those due to eager calls."""

PIECE = 4 << 20
"""Minimum size in bytes (4 MiB) of an intermediate that gets an allocation of its own."""


@dataclass(frozen=True, slots=True)
class Block:
    """Memory for intermediates from step ``born`` to ``died``, both included, each at byte ``offsets[index]``. An
    intermediate that outlives its step has a block of its own; the others of a step share one or more blocks."""

    nbytes: int
    born: int
    died: int
    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps with their memory. ``bounds`` are the launches of each step. ``owned`` has the steps (first, last) in which
    memory with a storage of its own is used: outputs, whose last step is that of the region, operands of eager calls,
    and their results. ``dead`` has the step after which an argument is no longer needed. ``held`` and ``ideal`` are
    bytes at the peak: of this plan, and of the uncaptured program."""

    bounds: Bounds
    blocks: tuple[Block, ...]
    owned: Mapping[int, tuple[int, int]]
    dead: Mapping[int, int]
    held: int
    ideal: int


def with_steps(program: Program, plan: Plan | None = None) -> Program:
    """``program`` with the steps of ``plan``, by default that of ``cut``, and with the memory that each step takes and
    releases."""
    plan = cut(program) if plan is None else plan
    recording = program.recording
    outputs = {o.index for o in recording.outputs if o.kind is OutputKind.FRESH}
    returned = returned_by_calls(recording, program.slots)
    steps: list[Step] = []
    for number, (begin, end) in enumerate(plan.bounds):
        owned = sorted(plan.owned.items())
        memory: dict[str, Any] = {
            "blocks": tuple((b.nbytes, b.died, dict(b.offsets)) for b in plan.blocks if b.born == number and b.offsets),
            "taken": tuple(i for i, (first, _) in owned if first == number and i not in returned),
            "released": tuple(i for i, (_, last) in owned if last == number and i not in outputs),
            "dead": tuple(sorted(argument for argument, last in plan.dead.items() if last == number)),
        }
        call = recording.launches[begin].eager if end > begin else None
        if call is None:
            steps.append(GraphSegment(begin, end, **memory))
        else:
            origin = recording.launches[begin].origin
            steps.append(EagerStep(begin, end, **memory, call=call, origin=origin))
    return replace(program, steps=tuple(steps))


def uncut(program: Program, lives: Sequence[Lifetime]) -> Program:
    """``program``, whose lifetimes are ``lives``, with the fewest steps: one for each eager call, and one for all
    launches between two of them."""
    facts = _Facts(program, lives)
    return with_steps(program, facts.plan(facts.fewest()))


def timeline(program: Program) -> tuple[tuple[str, int, int], ...]:
    """Name, lane and start of each launch, as if all took one unit of time; empty for a program without lanes."""
    order, found, start = program.order, list[tuple[str, int, int]](), 0
    if order is None or not order.lanes:
        return ()
    for step in program.steps:
        depths = order.depths(step.begin, step.end)
        for launch, depth in depths.items():
            told = program.recording.launches[launch]
            found.append((told.call or told.name, order.lanes[launch], start + depth - 1))
        start += max(depths.values(), default=0)
    return tuple(found)


def cut(program: Program, lives: Sequence[Lifetime] | None = None) -> Plan:
    """A plan of few steps with a peak close to that of the uncaptured program; the fewest steps if cuts save too
    little. A single segment has the program's ``layout``. ``lives`` are its lifetimes, if known."""
    facts = _Facts(program, lives)
    whole = facts.plan(facts.fewest())
    limit = whole.ideal + max(WORTHWHILE, int(EXCESS * whole.ideal))
    if whole.held <= limit:
        return whole
    segmented = facts.plan(facts.greedy(limit))
    if segmented.held > limit:  # packed workspaces exceed the sum of sizes in use: aim lower by the excess
        lower = facts.plan(facts.greedy(max(whole.ideal, 2 * limit - segmented.held)))
        segmented = min(segmented, lower, key=lambda plan: plan.held)
    return segmented if whole.held - segmented.held >= WORTHWHILE else whole


def uncaptured_peak(program: Program, lives: Sequence[Lifetime] | None = None) -> int:
    """Bytes at the peak of ``program``, in the order of its capture, when it runs uncaptured. Renamed allocations are
    those that they were captured as. The largest allocation that no launch uses counts throughout: torch keeps a
    library's workspace, which a replay takes only if a kernel uses it. ``lives`` are its lifetimes, if known."""
    facts = _Facts(program, lives)
    pool = [each for each in program.recording.allocations if each.kind is AllocationKind.POOL]
    addresses = {each.index: each.address for each in pool}
    spans = {life.index: (life.first, life.last) for life in facts.lives} | facts.owned
    held: dict[int, tuple[int, int, int]] = {}
    for index, (first, last) in spans.items():
        begin, end, nbytes = held.get(addresses[index], (first, last, facts.sizes[index]))
        held[addresses[index]] = min(begin, first), max(end, last), nbytes
    unused = max((each.nbytes for each in pool if each.index not in spans), default=0)
    return unused + max(_sums(max(facts.launches, 1), [*facts.arguments, *held.values()]))


def pieces(layout: Layout, sizes: Mapping[int, int]) -> list[tuple[int, dict[int, int]]]:
    """``layout`` cut at bytes that no intermediate spans: for each piece, its size in bytes and the offsets of its
    intermediates. ``sizes`` are the intermediates' bytes.

    In uncaptured calls, each intermediate takes free memory that torch's allocator has between tensors. One large
    workspace fits nowhere there, so the allocator would hold additional memory, though the peak in use is no higher; a
    large intermediate with a few more bytes does not fit, either. So each range of PIECE bytes or more is a piece of
    its own, and smaller ones are joined until they are as large.
    """
    edges = [0]
    for begin, end in pairwise(_borders(layout, sizes)):
        small = max(end - begin, begin - edges[-1]) < PIECE
        if begin and not small:
            edges.append(begin)
    members: list[dict[int, int]] = [{} for _ in edges]
    for index, offset in layout.offsets.items():
        place = bisect_right(edges, offset) - 1
        members[place][index] = offset - edges[place]
    lengths = (beyond - begin for begin, beyond in pairwise((*edges, layout.nbytes)))
    return list(zip(lengths, members, strict=True))


def _borders(layout: Layout, sizes: Mapping[int, int]) -> list[int]:
    """Bytes of ``layout`` that no intermediate spans, including its start and end."""
    borders, end = [0], 0
    for offset, index in sorted((offset, index) for index, offset in layout.offsets.items() if sizes[index]):
        if offset >= end and offset > borders[-1]:
            borders.append(offset)
        end = max(end, offset + sizes[index])
    return [*borders, layout.nbytes]


class _Facts:
    """Memory of a region, and the launches that use it.

    ``lives`` are its intermediates by their first launch; ``arguments`` and ``outputs`` are (first launch, last launch,
    bytes) of each. ``owned`` maps memory with a storage of its own to its first and last launch, ``dying`` an argument
    that may be released to its last launch. ``calls`` are the eager calls.
    """

    def __init__(self, program: Program, lives: Sequence[Lifetime] | None = None) -> None:
        recording = program.recording
        pool, given = AllocationKind.POOL, AllocationKind.INPUT
        self.launches, self.alignment = len(recording.launches), recording.alignment
        lives = lifetimes(recording, program.slots, program.layout.fresh, program.order) if lives is None else lives
        self.lives = sorted(lives, key=lambda life: life.first)
        sizes = {a.key: a.nbytes for a in recording.allocations}
        self.sizes = {index: nbytes for (kind, index), nbytes in sizes.items() if kind is pool}
        used: dict[tuple[AllocationKind, int], list[int]] = {}
        calls = recording.calls()
        for slot in program.slots:  # a kernel may leave addresses in memory for the next one of its call
            used.setdefault(slot.key, []).extend((calls[slot.launch].start, calls[slot.launch].stop - 1))
        end = max(self.launches - 1, 0)
        self.layout = program.layout
        self.calls = [launch.index for launch in recording.launches if launch.eager is not None]
        outputs = {o.index for o in recording.outputs if o.kind is OutputKind.FRESH}
        self.owned: dict[int, tuple[int, int]] = {}
        for index in sorted(returned_by_calls(recording, program.slots).union(program.layout.fresh)):
            launches = used.get((pool, index), [0])
            self.owned[index] = min(launches), end if index in outputs else max(launches)
        self.outputs = [(first, last, sizes[pool, i]) for i, (first, last) in self.owned.items()]
        needed = {o.index for o in recording.outputs if o.kind in (OutputKind.ARGUMENT, OutputKind.VIEW)}
        arguments = [index for kind, index in sizes if kind is given]
        self.dying = {i: max(used.get((given, i), [0])) for i in arguments if i not in needed | program.held}
        certain = {i: last for i, last in self.dying.items() if i not in program.lent}
        self.arguments = [(0, certain.get(i, end), sizes[given, i]) for i in arguments]
        # bytes by launch: of arguments still needed, of older intermediates, of outputs made before
        self._given = _sums(self.launches + 1, self.arguments)
        self._older = _sums(self.launches + 1, ((life.first + 1, life.last, life.nbytes) for life in self.lives))
        made = ((first + 1, last + 1 if last == end else last, n) for first, last, n in self.outputs)
        self._made = _sums(self.launches + 1, (span for span in made if span[0] <= span[1]))

    # -- where to cut ---------------------------------------------------------------------------------------------

    def fewest(self) -> Bounds:
        """A step for each eager call, and one for all launches between two of them."""
        edges = sorted({0, self.launches, *self.calls, *(call + 1 for call in self.calls)})
        return tuple(pairwise(edges)) or ((0, 0),)

    def greedy(self, goal: int) -> Bounds:
        """Segments, each extended while it holds at most ``goal`` bytes, or as much as its first launches. The goal is
        raised if there would be more than MOST_SEGMENTS."""
        fewest, cut = self.fewest(), list[tuple[int, int]]()
        for first, last in fewest:
            begin = first
            while begin < last:
                if len(cut) == MOST_SEGMENTS + len(fewest) - 1:
                    return self.greedy(goal + goal // 64)
                shortest = min(begin + FEWEST_LAUNCHES, last)
                bound = max(goal, self._needs(begin, shortest))
                longer = range(shortest + 1, last + 1)
                end = shortest + bisect_right(longer, bound, key=partial(self._needs, begin))
                cut.append((begin, end))
                begin = end
        return tuple(cut)

    def _needs(self, begin: int, end: int) -> int:
        """Bytes held while the launches from ``begin`` to ``end`` run as one segment among others: memory that was made
        before them or outlives them counts for all of it, their own intermediates at the peak of their lifetimes."""
        low, high = (bisect_left(self.lives, launch, key=lambda life: life.first) for launch in (begin, end))
        lives = self.lives[low:high]
        own = _sums(end - begin, ((x.first - begin, x.last - begin, x.nbytes) for x in lives if x.last < end))
        beyond = sum(life.nbytes for life in lives if life.last >= end)
        return self._given[begin] + self._made[end] + self._older[begin] + beyond + max(own)

    # -- plans ---------------------------------------------------------------------------------------------------

    def plan(self, bounds: Bounds) -> Plan:
        """Steps with these ``bounds``."""
        where = [number for number, (begin, end) in enumerate(bounds) for _ in range(begin, end)] or [0]
        local: list[list[Lifetime]] = [[] for _ in bounds]
        crossing: list[Block] = []
        for life in self.lives:
            born, died = where[life.first], where[life.last]
            if born == died:
                local[born].append(life)
            else:
                crossing.append(Block(life.nbytes, born, died, {life.index: 0}))
        single = (self.layout,) if len(bounds) == 1 else None
        layouts = single or tuple(pack(lives, self.alignment) for lives in local)
        apart = [(step, *piece) for step, each in enumerate(layouts) for piece in pieces(each, self.sizes)]
        blocks = (*(Block(nbytes, step, step, offsets) for step, nbytes, offsets in apart), *crossing)
        owned = {index: (where[first], where[last]) for index, (first, last) in self.owned.items()}
        dead = {index: where[last] for index, last in self.dying.items()}
        outside = [*self.outputs, *self.arguments]
        kept = [(where[first], where[last], nbytes) for first, last, nbytes in outside]
        held = max(_sums(len(bounds), [*kept, *((block.born, block.died, block.nbytes) for block in blocks)]))
        everything = [*outside, *((life.first, life.last, life.nbytes) for life in self.lives)]
        ideal = max(_sums(max(self.launches, 1), everything))
        return Plan(bounds, blocks, owned, dead, held, ideal)


def _sums(count: int, spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """For each of ``count`` positions, the bytes of all ``spans`` (first, last, bytes) that contain it."""
    changes = [0] * (count + 1)
    for first, last, nbytes in spans:
        changes[first] += nbytes
        changes[last + 1] -= nbytes
    return list(accumulate(changes))[:-1]
