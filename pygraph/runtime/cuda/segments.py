"""Cuts a large region into segments that are launched one after the other, with memory given back in between.

One graph holds its arguments, outputs and intermediates all at once, where the uncaptured program gives each back
after its last use. A segment goes on for as long as it holds no more than the uncaptured program does at its peak, and
a little; a region that holds little is one segment. Pure functions over a Program.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
    """An intermediate that outlives its segment: memory of its own from segment ``born`` to ``died``, both included."""

    index: int
    nbytes: int
    born: int
    died: int


@dataclass(frozen=True, slots=True)
class Segments:
    """``bounds`` are the launches of each segment, ``workspaces`` the layouts of what lives in one only, in one or more
    pieces that are allocated each by itself.

    ``fresh`` gives the segment that an output's memory is first used in, ``dead`` the arguments that are not needed
    any more after a segment. ``held`` and ``ideal`` are bytes at the peak: of this plan, and of the uncaptured program.
    """

    bounds: Bounds
    workspaces: tuple[tuple[Layout, ...], ...]
    blocks: tuple[Block, ...]
    fresh: Mapping[int, int]
    dead: Mapping[int, int]
    held: int
    ideal: int


def cut(program: Program) -> Segments:
    """Few segments whose peak comes close to the uncaptured program's; one, with ``layout``, where that saves too
    little. Workspaces are in pieces."""
    facts = _Facts(program)
    whole = facts.plan(facts.everything, program.layout)
    limit = whole.ideal + max(WORTHWHILE, int(EXCESS * whole.ideal))
    if whole.held <= limit:
        return whole
    segmented = facts.plan(facts.greedy(limit))
    if segmented.held > limit:  # to pack workspaces took more than their sizes tell: aim lower by as much
        lower = facts.plan(facts.greedy(max(whole.ideal, 2 * limit - segmented.held)))
        segmented = min(segmented, lower, key=lambda plan: plan.held)
    return segmented if whole.held - segmented.held >= WORTHWHILE else whole


def pieces(layout: Layout, sizes: Mapping[int, int]) -> Iterator[Layout]:
    """``layout`` cut where no intermediate lies across. ``sizes``: their bytes.

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
    for (begin, beyond), offsets in zip(pairwise((*edges, layout.nbytes)), members, strict=True):
        yield Layout(beyond - begin, offsets, layout.fresh if begin == 0 else ())


def _borders(layout: Layout, sizes: Mapping[int, int]) -> list[int]:
    """Where no intermediate of ``layout`` lies across, its begin and end included."""
    borders, end = [0], 0
    for offset, index in sorted((offset, index) for index, offset in layout.offsets.items() if sizes[index]):
        if offset >= end and offset > borders[-1]:
            borders.append(offset)
        end = max(end, offset + sizes[index])
    return [*borders, layout.nbytes]


class _Facts:
    """Sizes in bytes and uses by launch of everything that a region holds.

    ``fresh`` maps an output to (bytes, first launch), ``arguments`` an argument to (bytes, last launch; the number of
    launches for one that is returned, or that others may keep), ``dying`` those to let go of to their last launch.
    """

    def __init__(self, program: Program) -> None:
        recording, keepers = program.recording, program.keepers
        pool, given = AllocationKind.POOL, AllocationKind.INPUT
        self.launches, self.alignment = len(recording.launches), recording.alignment
        self.lives = sorted(lifetimes(recording, program.slots, program.layout.fresh), key=lambda life: life.first)
        sizes = {a.key: a.nbytes for a in recording.allocations}
        self.sizes = {index: nbytes for (kind, index), nbytes in sizes.items() if kind is pool}
        first: dict[tuple[AllocationKind, int], int] = {}
        last: dict[tuple[AllocationKind, int], int] = {}
        for slot in program.slots:
            key = (slot.kind, slot.index)
            first[key] = min(first.get(key, slot.launch), slot.launch)
            last[key] = max(last.get(key, slot.launch), slot.launch)
        needed = {o.argument for o in recording.outputs if o.kind in (OutputKind.ARGUMENT, OutputKind.VIEW)}
        needed |= keepers.held
        arguments = [index for kind, index in sizes if kind is given]
        self.dying = {i: last.get((given, i), 0) for i in arguments if i not in needed}
        self.fresh = {i: (sizes[pool, i], first.get((pool, i), 0)) for i in program.layout.fresh}
        until = {i: self.launches if i in keepers.lent else self.dying.get(i, self.launches) for i in arguments}
        self.arguments = {i: (sizes[given, i], until[i]) for i in arguments}
        self._sum_up()

    def _sum_up(self) -> None:
        """Bytes by launch: of arguments that are still needed (``_given``), of intermediates that are older
        (``_older``), of outputs that were made before (``_made``)."""
        count = self.launches + 1
        self._given, self._older, self._made = [0] * count, [0] * count, [0] * count
        for nbytes, last in self.arguments.values():
            _add(self._given, 0, min(last, self.launches - 1), nbytes)
        for life in self.lives:
            _add(self._older, life.first + 1, life.last, life.nbytes)
        for nbytes, first in self.fresh.values():
            self._made[min(first + 1, self.launches)] += nbytes
        for amounts in (self._given, self._older, self._made):
            amounts[:] = accumulate(amounts)

    @property
    def everything(self) -> Bounds:
        """The bounds of one segment."""
        return ((0, self.launches),)

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
        own, beyond = [0] * (end - begin + 1), 0
        for life in self.lives[low:high]:
            if life.last >= end:
                beyond += life.nbytes
            else:
                _add(own, life.first - begin, life.last - begin, life.nbytes)
        return self._given[begin] + self._made[end] + self._older[begin] + beyond + max(_sums(own), default=0)

    # -- what a cut comes to --------------------------------------------------------------------------------------

    def plan(self, bounds: Bounds, layout: Layout | None = None) -> Segments:
        """Segments with these ``bounds``; ``layout`` is that of a single one."""
        where = [number for number, (begin, end) in enumerate(bounds) for _ in range(begin, end)] or [0]
        where.append(where[-1])
        local: list[list[Lifetime]] = [[] for _ in bounds]
        blocks: list[Block] = []
        for life in self.lives:
            born, died = where[life.first], where[life.last]
            if born == died:
                local[born].append(life)
            else:
                blocks.append(Block(life.index, life.nbytes, born, died))
        layouts = (layout,) if layout is not None else tuple(pack(lives, self.alignment) for lives in local)
        fresh = {index: where[first] for index, (_, first) in self.fresh.items()}
        dead = {index: where[last] for index, last in self.dying.items()}
        held = self._held(where, layouts, blocks)
        workspaces = tuple(tuple(pieces(each, self.sizes)) for each in layouts)
        return Segments(bounds, workspaces, tuple(blocks), fresh, dead, held, self._ideal())

    def _held(self, where: Sequence[int], layouts: Sequence[Layout], blocks: Sequence[Block]) -> int:
        """Bytes at the peak over all segments. ``where`` gives that of each launch."""
        last = where[-1]
        changes = [0] * (last + 2)
        for block in blocks:
            _add(changes, block.born, block.died, block.nbytes)
        for nbytes, first in self.fresh.values():
            _add(changes, where[first], last, nbytes)
        for nbytes, needed in self.arguments.values():
            _add(changes, 0, where[needed], nbytes)
        return max((held + layout.nbytes for held, layout in zip(_sums(changes), layouts, strict=True)), default=0)

    def _ideal(self) -> int:
        """Bytes at the peak when everything is given back after its last use, and allocated before its first."""
        changes = [0] * (self.launches + 1)
        for life in self.lives:
            _add(changes, life.first, life.last, life.nbytes)
        for nbytes, first in self.fresh.values():
            _add(changes, first, self.launches - 1, nbytes)
        for nbytes, last in self.arguments.values():
            _add(changes, 0, min(last, self.launches - 1), nbytes)
        return max(_sums(changes), default=0)


def _add(changes: list[int], first: int, last: int, nbytes: int) -> None:
    """``nbytes`` more from ``first`` to ``last``, both included."""
    if changes[:-1]:
        changes[first] += nbytes
        changes[last + 1] -= nbytes


def _sums(changes: Sequence[int]) -> list[int]:
    """Running sums, without the last, which is behind the end."""
    return list(accumulate(changes))[:-1]
