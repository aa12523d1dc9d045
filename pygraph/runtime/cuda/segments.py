"""Cuts a large region into segments that are launched one after the other, with memory given back in between.

One graph holds its arguments, outputs and intermediates all at once, where the uncaptured program gives each back
after its last use. A segment goes on for as long as it holds no more than the uncaptured program does at its peak, and
a little; a region that holds little is one segment. Pure functions over a Program.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

from pygraph.runtime.contract import Layout, Program
from pygraph.runtime.layout import Lifetime, lifetimes, pack
from pygraph.runtime.recording import AllocationKind, OutputKind

__all__ = ["Block", "Segments", "cut", "pieces"]

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""The launches (begin, end) of each segment, in order."""

WORTHWHILE = 32 << 20
"""Bytes that a cut has to save (32 MiB): below, more launches cost more than the memory is worth."""

EXCESS = 0.02
"""Part of the uncaptured program's peak by which segments may exceed it."""

FEWEST_LAUNCHES = 2
"""Launches that a segment has at least."""

MOST_SEGMENTS = 64

PIECE = 4 << 20
"""Bytes of workspace (4 MiB) from which on an intermediate is worth an allocation of its own."""


@dataclass(frozen=True, slots=True)
class Block:
    """Memory for intermediates from segment ``born`` to ``died``, both included, each ``offsets[index]`` bytes into it.
    An intermediate that outlives its segment has one of its own; the others of a segment share one or more."""

    nbytes: int
    born: int
    died: int
    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Segments:
    """``bounds`` are the launches of each segment. ``fresh`` gives the segment that an output's memory is first used
    in, ``dead`` the arguments that are not needed any more after a segment. ``held`` and ``ideal`` are bytes at the
    peak: of this plan, and of the uncaptured program."""

    bounds: Bounds
    blocks: tuple[Block, ...]
    fresh: Mapping[int, int]
    dead: Mapping[int, int]
    held: int
    ideal: int


def cut(program: Program) -> Segments:
    """Few segments whose peak comes close to the uncaptured program's; one, with ``layout``, where that saves too
    little."""
    facts = _Facts(program)
    whole = facts.plan(((0, facts.launches),), program.layout)
    limit = whole.ideal + max(WORTHWHILE, int(EXCESS * whole.ideal))
    if whole.held <= limit:
        return whole
    segmented = facts.plan(facts.greedy(limit))
    if segmented.held > limit:  # to pack workspaces took more than their sizes tell: aim lower by as much
        lower = facts.plan(facts.greedy(max(whole.ideal, 2 * limit - segmented.held)))
        segmented = min(segmented, lower, key=lambda plan: plan.held)
    return segmented if whole.held - segmented.held >= WORTHWHILE else whole


def pieces(layout: Layout, sizes: Mapping[int, int]) -> list[tuple[int, dict[int, int]]]:
    """``layout`` cut where no intermediate lies across: the bytes of each piece, and what lies where in it. ``sizes``
    are the intermediates' bytes.

    Uncaptured, each intermediate takes what memory torch's allocator has left between tensors. One large workspace
    fits nowhere there, so that the allocator would hold it besides, though never more is in use at once; nor does a
    large intermediate with a few bytes more. So what reaches over PIECE bytes and more is a piece as it is, and what
    is smaller goes together, until it is as large.
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
    """Where no intermediate of ``layout`` lies across, its begin and end included."""
    borders, end = [0], 0
    for offset, index in sorted((offset, index) for index, offset in layout.offsets.items() if sizes[index]):
        if offset >= end and offset > borders[-1]:
            borders.append(offset)
        end = max(end, offset + sizes[index])
    return [*borders, layout.nbytes]


class _Facts:
    """What a region holds, and the launches that use it.

    ``lives`` are its intermediates by their first launch; ``arguments`` and ``outputs`` say (first launch, last launch,
    bytes) of each. ``fresh`` maps an output to its first launch, ``dying`` an argument to let go of to its last one.
    """

    def __init__(self, program: Program) -> None:
        recording = program.recording
        pool, given = AllocationKind.POOL, AllocationKind.INPUT
        self.launches, self.alignment = len(recording.launches), recording.alignment
        self.lives = sorted(lifetimes(recording, program.slots, program.layout.fresh), key=lambda life: life.first)
        sizes = {a.key: a.nbytes for a in recording.allocations}
        self.sizes = {index: nbytes for (kind, index), nbytes in sizes.items() if kind is pool}
        used: dict[tuple[AllocationKind, int], list[int]] = {}
        for slot in program.slots:
            used.setdefault(slot.key, []).append(slot.launch)
        end = max(self.launches - 1, 0)
        self.fresh = {i: min(used.get((pool, i), [0])) for i in program.layout.fresh}
        self.outputs = [(first, end, sizes[pool, i]) for i, first in self.fresh.items()]
        needed = {o.index for o in recording.outputs if o.kind in (OutputKind.ARGUMENT, OutputKind.VIEW)}
        arguments = [index for kind, index in sizes if kind is given]
        self.dying = {i: max(used.get((given, i), [0])) for i in arguments if i not in needed | program.held}
        certain = {i: last for i, last in self.dying.items() if i not in program.lent}
        self.arguments = [(0, certain.get(i, end), sizes[given, i]) for i in arguments]
        # bytes by launch: of arguments that are still needed, of older intermediates, of outputs that were made before
        self._given = _sums(self.launches + 1, self.arguments)
        self._older = _sums(self.launches + 1, ((life.first + 1, life.last, life.nbytes) for life in self.lives))
        self._made = _sums(self.launches + 1, ((first + 1, self.launches, n) for first, _, n in self.outputs))

    # -- where to cut ---------------------------------------------------------------------------------------------

    def greedy(self, goal: int) -> Bounds:
        """Segments of which each goes on while it holds no more than ``goal`` bytes, or than its first launches. More
        bytes, where there would be more than MOST_SEGMENTS."""
        edges = [0]
        while edges[-1] < self.launches:
            begin = edges[-1]
            shortest = min(begin + FEWEST_LAUNCHES, self.launches)
            bound = max(goal, self._needs(begin, shortest))
            longer = range(shortest + 1, self.launches + 1)
            edges.append(shortest + bisect_right(longer, bound, key=partial(self._needs, begin)))
        few = len(edges) - 1 <= MOST_SEGMENTS
        return tuple(pairwise(edges)) if few else self.greedy(goal + goal // 64)

    def _needs(self, begin: int, end: int) -> int:
        """Bytes that are held while the launches from ``begin`` to ``end`` run as one segment among others: what was
        made before them or outlives them all along, intermediates of their own as these take turns."""
        low, high = (bisect_left(self.lives, launch, key=lambda life: life.first) for launch in (begin, end))
        lives = self.lives[low:high]
        own = _sums(end - begin, ((x.first - begin, x.last - begin, x.nbytes) for x in lives if x.last < end))
        beyond = sum(life.nbytes for life in lives if life.last >= end)
        return self._given[begin] + self._made[end] + self._older[begin] + beyond + max(own)

    # -- what a cut comes to --------------------------------------------------------------------------------------

    def plan(self, bounds: Bounds, layout: Layout | None = None) -> Segments:
        """Segments with these ``bounds``; ``layout`` is that of a single one."""
        where = [number for number, (begin, end) in enumerate(bounds) for _ in range(begin, end)] or [0]
        local: list[list[Lifetime]] = [[] for _ in bounds]
        crossing: list[Block] = []
        for life in self.lives:
            born, died = where[life.first], where[life.last]
            if born == died:
                local[born].append(life)
            else:
                crossing.append(Block(life.nbytes, born, died, {life.index: 0}))
        layouts = (layout,) if layout is not None else tuple(pack(lives, self.alignment) for lives in local)
        apart = [(segment, *piece) for segment, each in enumerate(layouts) for piece in pieces(each, self.sizes)]
        blocks = (*(Block(nbytes, segment, segment, offsets) for segment, nbytes, offsets in apart), *crossing)
        fresh = {index: where[first] for index, first in self.fresh.items()}
        dead = {index: where[last] for index, last in self.dying.items()}
        outside = [*self.outputs, *self.arguments]
        kept = [(where[first], where[last], nbytes) for first, last, nbytes in outside]
        held = max(_sums(len(bounds), [*kept, *((block.born, block.died, block.nbytes) for block in blocks)]))
        everything = [*outside, *((life.first, life.last, life.nbytes) for life in self.lives)]
        ideal = max(_sums(max(self.launches, 1), everything))
        return Segments(bounds, blocks, fresh, dead, held, ideal)


def _sums(count: int, spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """For each of ``count`` places, the bytes of all ``spans`` (first, last, bytes) that it lies in."""
    changes = [0] * (count + 1)
    for first, last, nbytes in spans:
        changes[first] += nbytes
        changes[last + 1] -= nbytes
    return list(accumulate(changes))[:-1]
